// Save what is marked on one image: one request at a time, in order, until the server has it. What it does not have yet
// is in sessionStorage, so that a page that is loaded again goes on with it.

const DEBOUNCE_MS = 150;
const WAITS_MS = [500, 1000, 2000, 4000];
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const near = (a, b) => a === b || (typeof a === "number" && typeof b === "number" && Math.abs(a - b) < 0.02);

export const sameMarks = (a, b) =>
  a.objects.length === b.objects.length &&
  a.objects.every((object, n) => object.every((value, k) => near(value, b.objects[n][k])));

// Ask the server. `{status: 0}` where it is not there.
export async function ask(address, csrf, body) {
  try {
    const how = body ? { method: "POST", body: JSON.stringify(body) } : {};
    const headers = { "content-type": "application/json", "x-csrf-token": csrf };
    const answer = await fetch(address, { ...how, headers, signal: AbortSignal.timeout(30000) });
    const text = await answer.text();
    try {
      return { status: answer.status, ...JSON.parse(text) };
    } catch {
      return { status: answer.status, error: text.slice(0, 300) };
    }
  } catch {
    return { status: 0, error: "the server does not answer" };
  }
}

export class Saver {
  // `tell(state, text)`: saved, saving, failing (goes on trying) or refused; `conflict(answer)`: somebody else has it.
  constructor({ address, csrf, key, tell, conflict, saved }) {
    Object.assign(this, { address, csrf, key, tell, conflict, saved });
    this.rev = "";
    this.wanted = this.sent = null;
    this.running = null;
    addEventListener("beforeunload", (event) => this.dirty && event.preventDefault());
  }

  get dirty() {
    return Boolean(this.wanted || this.sent);
  }

  // Return the marks that an earlier page had not saved; `start` goes on with their saving.
  restore() {
    let kept;
    try {
      kept = JSON.parse(sessionStorage.getItem(this.key));
    } catch {
      return null;
    }
    if (!kept) return null;
    [this.rev, this.sent, this.wanted] = [kept.rev, kept.sent, kept.wanted];
    return this.wanted ?? this.sent;
  }

  want(marks) {
    this.wanted = marks;
    this.keep();
    this.start(DEBOUNCE_MS);
  }

  // Forget what is not saved.
  drop() {
    this.wanted = this.sent = null;
    this.keep();
  }

  // Wait until all is saved; false where it cannot be now.
  async flush() {
    this.hurry?.();
    await this.running;
    return !this.dirty;
  }

  keep() {
    try {
      if (this.dirty) sessionStorage.setItem(this.key, JSON.stringify({ rev: this.rev, sent: this.sent, wanted: this.wanted }));
      else sessionStorage.removeItem(this.key);
    } catch {
      // A full storage: the marks are on the screen still, and the page warns before it is left.
    }
  }

  start(wait) {
    if (this.running) return;
    this.tell("saving", "");
    this.running = (async () => {
      await Promise.race([sleep(wait), new Promise((now) => (this.hurry = now))]);
      await this.run();
      this.running = null;
    })();
  }

  async run() {
    let failures = 0;
    while (this.dirty) {
      this.sent ??= this.wanted;
      if (this.sent === this.wanted) this.wanted = null;
      this.keep();
      const answer = await ask(this.address, this.csrf, { ...this.sent, rev: this.rev });
      if (!this.sent) return; // dropped meanwhile
      if (answer.status === 200 || (answer.status === 409 && this.isOurs(answer.draft))) {
        failures = 0;
        this.rev = answer.draft.rev;
        this.sent = null;
        this.keep();
        this.saved(answer);
      } else if (answer.status === 409) {
        this.wanted ??= this.sent;
        this.sent = null;
        this.keep();
        this.tell("refused", answer.error);
        this.conflict(answer);
        return;
      } else if ([0, 202, 401, 403, 429].includes(answer.status) || answer.status >= 500) {
        this.tell(answer.status === 202 ? "saving" : "failing", answer.error ?? "");
        await sleep(WAITS_MS[Math.min(failures++, WAITS_MS.length - 1)]);
        if (answer.status === 403 || answer.status === 401) await this.comeAgain();
      } else {
        this.wanted ??= this.sent;
        this.sent = null;
        this.tell("refused", [answer.error, answer.hint].filter(Boolean).join(". "));
        return;
      }
    }
    this.tell("saved", "");
  }

  // The server has what we sent: the answer alone was lost.
  isOurs(draft) {
    return Boolean(draft?.mine) && draft.done === this.sent.done && sameMarks(draft, this.sent) &&
      JSON.stringify(draft.labels) === JSON.stringify(this.sent.labels);
  }

  // After a server began anew the token of this page may be an old one.
  async comeAgain() {
    const answer = await ask(this.address, this.csrf);
    if (answer.csrf) this.csrf = answer.csrf;
  }
}

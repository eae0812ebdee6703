// The editor: objects of an image, drawn, moved, resized, relabelled and deleted with mouse and keyboard. Each change is
// saved (save.js); what is here is one list of marks, which every change replaces, and what is drawn of it.

import { isTyping } from "/static/page.js";
import { ask, Saver } from "/static/save.js";
import { Zoom } from "/static/zoom.js";

const SVG = "http://www.w3.org/2000/svg";
const GRIP = 9; // of the screen's pixels
const CLICK = 3; // a pointer that moves less has clicked
const SHOWN_TEXTS = 200, LISTED = 300, CLASSES = 200;
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const GRIPS = [["x1", "y1"], ["", "y1"], ["x2", "y1"], ["x2", ""], ["x2", "y2"], ["", "y2"], ["x1", "y2"], ["x1", ""]];
const WAIT_MS = 400;

const root = document.querySelector("#mark");
const stage = root.querySelector("#stage");
const svg = root.querySelector("#marks");
const get = (id) => root.querySelector(`#${id}`);
const [width, height] = [Number(stage.dataset.width), Number(stage.dataset.height)];

let before = []; // the version's objects
let classes = []; // [label, colour]
let marks = [], labels = null, wholeLabels = [];
let selected = -1, current = null, done = false;
let undone = [], redone = [], joined = "";
let frozen = true, theirs = null, showsTheirs = false;
let drag = null, space = false, saver = null;

// --- texts ----------------------------------------------------------------------------------------------------------

// As the server's templates show it: what is not seen becomes an escape.
const shown = (text) => text.replace(/[\p{C}\p{Z}]/gu, (c) => {
  if (c === " " || c === "\u200c" || c === "\u200d") return c;
  return `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`;
});
const number = (value) => String(Math.round(value * 100) / 100);
const colourOf = (label) => classes.find(([each]) => each === label)?.[1] ?? "#808080";
const scoreOf = (mark) => (mark.of >= 0 && !mark.accepted ? before[mark.of].score : null);
const isShape = (mark) => mark.of >= 0 && before[mark.of].shape.length > 0;
const told = (mark) => {
  const score = scoreOf(mark);
  return shown(mark.label) + (score === null ? "" : ` ${number(score)}?`);
};

function make(tag, attributes = {}, text = "") {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

function draw(tag, attributes, parent) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent?.append(element);
  return element;
}

// --- what is marked -------------------------------------------------------------------------------------------------

const unpacked = ([of, label, x1, y1, x2, y2, accepted]) => ({ of, label, x1, y1, x2, y2, accepted });
const packed = ({ of, label, x1, y1, x2, y2, accepted }) => [of, label, x1, y1, x2, y2, accepted];
const untouched = () => before.map(({ label, x1, y1, x2, y2 }, of) => ({ of, label, x1, y1, x2, y2, accepted: false }));
const body = () => ({ objects: marks.map(packed), labels, done });

// Replace the marks. Changes of one kind (`join`) one right after the other are undone together.
function change(next, { select = selected, join = "", tags = labels } = {}) {
  if (frozen) return;
  if (!join || join !== joined) undone.push({ marks, labels });
  joined = join;
  redone = [];
  put(next, tags, select);
}

function put(next, tags, select) {
  [marks, labels, done] = [next, tags, false];
  selected = Math.min(select, marks.length - 1);
  saver.want(body());
  render();
}

function step(from, to) {
  if (frozen || !from.length) return;
  to.push({ marks, labels });
  joined = "";
  const state = from.pop();
  put(state.marks, state.labels, selected);
}

const edit = (n, values, join) => change(marks.map((mark, k) => (k === n ? { ...mark, ...values } : mark)), { join });

function remove(n) {
  if (n < 0) return;
  const rest = marks.filter((_, k) => k !== n);
  change(rest, { select: Math.min(n, rest.length - 1) });
}

function add(box) {
  const label = current ?? classes[0]?.[0] ?? "object";
  const isNew = !classes.length;
  change([...marks, { of: -1, label, ...box, accepted: false }], { select: marks.length });
  if (isNew) get("class").focus();
}

function relabel(label) {
  label = label.trim();
  if (!label) return;
  if (!classes.some(([each]) => each === label)) classes.push([label, "#808080"]);
  current = label;
  if (selected >= 0) edit(selected, { label });
  render();
}

// Move a mark by so many pixels, within the image.
function move(n, dx, dy, join) {
  const mark = marks[n];
  if (isShape(mark)) return tell("It has an outline or keypoints, and can be relabelled or deleted.");
  const next = moved(mark, dx, dy);
  if (next.x1 !== mark.x1 || next.y1 !== mark.y1) edit(n, next, join);
}

// Move edges of a mark to places; edges that pass one another change their names.
function resized(mark, edges, [x, y]) {
  const next = { ...mark };
  if (edges[0]) next[edges[0]] = Math.max(0, Math.min(width, Math.round(x)));
  if (edges[1]) next[edges[1]] = Math.max(0, Math.min(height, Math.round(y)));
  if (next.x1 > next.x2) [next.x1, next.x2] = [next.x2, next.x1];
  if (next.y1 > next.y2) [next.y1, next.y2] = [next.y2, next.y1];
  return next.x2 - next.x1 < 1 || next.y2 - next.y1 < 1 ? mark : next;
}

function stretch(n, dx, dy) {
  const mark = marks[n];
  if (isShape(mark)) return tell("It has an outline or keypoints, and can be relabelled or deleted.");
  const x2 = Math.max(mark.x1 + 1, Math.min(width, mark.x2 + dx)), y2 = Math.max(mark.y1 + 1, Math.min(height, mark.y2 + dy));
  if (x2 !== mark.x2 || y2 !== mark.y2) edit(n, { x2: Math.min(x2, width), y2: Math.min(y2, height) }, `stretch ${n}`);
}

function drawInTheMiddle() {
  const middle = zoom.place(zoom.middle()), size = Math.max(2, Math.round(Math.min(width, height) / 4));
  const start = (side, at) => Math.max(0, Math.min(side - size, Math.round(at - size / 2)));
  const [x1, y1] = [start(width, middle[0]), start(height, middle[1])];
  add({ x1, y1, x2: Math.min(width, x1 + size), y2: Math.min(height, y1 + size) });
}

function judge(accepts, all) {
  const meant = (mark, n) => scoreOf(mark) !== null && (all || n === selected);
  if (!marks.some(meant)) return tell("There is no prediction to accept or reject.");
  if (accepts) return change(marks.map((mark, n) => (meant(mark, n) ? { ...mark, accepted: true } : mark)));
  change(marks.filter((mark, n) => !meant(mark, n)));
}

// --- what is drawn --------------------------------------------------------------------------------------------------

const drawn = new WeakMap();
const [wasLayer, layer, top] = ["was", "layer", "top"].map((name) => draw("g", { class: name }, svg));

function elementOf(mark, n) {
  let known = drawn.get(mark);
  if (!known) {
    const predicted = scoreOf(mark) !== null;
    const element = draw("g", { class: predicted ? "one predicted" : "one" });
    const shape = isShape(mark) ? before[mark.of].shape : [`M${mark.x1} ${mark.y1}H${mark.x2}V${mark.y2}H${mark.x1}z`];
    draw("path", { d: shape.join(""), class: predicted ? "o d" : "o" }, element);
    drawn.set(mark, (known = { element, colour: "", is: false }));
  }
  const colour = colourOf(mark.label), is = n === selected;
  if (colour !== known.colour) known.element.setAttribute("stroke", (known.colour = colour));
  if (is !== known.is) known.element.classList.toggle("selected", (known.is = is));
  return known.element;
}

// Have a layer show these elements: of thousands, few change at a time.
function show(elements) {
  elements.forEach((element, n) => {
    const there = layer.children[n];
    if (there === element) return;
    if (there) there.replaceWith(element);
    else layer.append(element);
  });
  while (layer.children.length > elements.length) layer.lastChild.remove();
}

function render() {
  const list = showsTheirs && theirs ? theirs.objects.map(unpacked) : marks;
  show(list.map(elementOf));
  wasLayer.replaceChildren(...(get("was").checked ? untouched().map((each) => elementOf(each, -1)) : []));
  top.replaceChildren();
  top.setAttribute("font-size", 13 / zoom.scale);
  if (list.length <= SHOWN_TEXTS) {
    for (const mark of list) {
      draw("text", { x: mark.x1 + 2 / zoom.scale, y: Math.max(mark.y1 - 3 / zoom.scale, 12 / zoom.scale) }, top).textContent = told(mark);
    }
  }
  if (drag?.box) draw("path", { class: "o new", d: `M${drag.box.x1} ${drag.box.y1}H${drag.box.x2}V${drag.box.y2}H${drag.box.x1}z` }, top);
  const mark = showsTheirs ? null : marks[selected];
  if (mark && !isShape(mark)) {
    const size = GRIP / zoom.scale;
    for (const [x, y] of GRIPS) {
      const at = [x ? mark[x] : (mark.x1 + mark.x2) / 2, y ? mark[y] : (mark.y1 + mark.y2) / 2];
      const grip = { class: "grip", x: at[0] - size / 2, y: at[1] - size / 2, width: size, height: size };
      draw("rect", { ...grip, "data-x": x, "data-y": y }, top);
    }
  }
  renderSide(mark);
}

function renderSide(mark) {
  const predictions = marks.filter((each) => scoreOf(each) !== null).length;
  get("number").textContent = `${marks.length} object${marks.length === 1 ? "" : "s"}${predictions ? `, ${predictions} predicted` : ""}`;
  get("about").textContent = mark
    ? `${told(mark)}, ${selected + 1} of ${marks.length}: ${number(mark.x1)}, ${number(mark.y1)} to ${number(mark.x2)}, ${number(mark.y2)}, ` +
      `${number(mark.x2 - mark.x1)} x ${number(mark.y2 - mark.y1)} pixels` +
      (isShape(mark) ? ". It has an outline or keypoints, and can be relabelled or deleted" : "")
    : "Nothing is selected";
  const predicted = mark && scoreOf(mark) !== null;
  const off = { remove: !mark, accept: !predicted, reject: !predicted, "accept-all": !predictions, "reject-all": !predictions };
  off.undo = !undone.length;
  off.redo = !redone.length;
  for (const [id, is] of Object.entries(off)) get(id).disabled = is || frozen;
  for (const id of ["new", "class"]) get(id).disabled = frozen;
  const label = mark?.label ?? current ?? classes[0]?.[0];
  const asked = get("class").value.trim().toLowerCase();
  const found = classes.map(([each], n) => [each, n]).filter(([each]) => each.toLowerCase().includes(asked)).slice(0, CLASSES);
  get("classes").replaceChildren(...found.map(([each, n]) => {
    const item = make("li"), button = make("button", { type: "button", "aria-pressed": String(each === label) });
    const swatch = draw("svg", { width: 12, height: 12, "aria-hidden": "true" }, button);
    draw("rect", { width: 12, height: 12, fill: colourOf(each) }, swatch);
    button.append(" ", make("bdi", {}, shown(each)));
    if (n < 9) button.append(" ", make("kbd", {}, String(n + 1)));
    button.disabled = frozen;
    button.addEventListener("click", () => relabel(each));
    item.append(button);
    return item;
  }));
  get("objects").replaceChildren(...marks.slice(0, LISTED).map((each, n) => {
    const item = make("li"), button = make("button", { type: "button", "aria-pressed": String(n === selected) });
    const swatch = draw("svg", { width: 12, height: 12, "aria-hidden": "true" }, button);
    draw("rect", { width: 12, height: 12, fill: colourOf(each.label) }, swatch);
    button.append(" ", make("bdi", {}, told(each)), make("span", { class: "quiet" }, ` ${number(each.x1)}, ${number(each.y1)}`));
    button.addEventListener("click", () => select(n));
    item.append(button);
    return item;
  }));
  if (marks.length > LISTED) get("objects").append(make("li", { class: "quiet" }, `and ${marks.length - LISTED} more`));
  const tags = labels ?? wholeLabels;
  get("tags").replaceChildren(...tags.map((tag) => {
    const item = make("li"), button = make("button", { type: "button", "aria-label": `Take away ${shown(tag)}` }, "×");
    button.disabled = frozen;
    button.addEventListener("click", () => change(marks, { tags: tags.filter((each) => each !== tag) }));
    item.append(make("bdi", { class: "tag" }, shown(tag)), " ", button);
    return item;
  }));
}

function select(n) {
  selected = n;
  joined = "";
  render();
  root.querySelector("#objects [aria-pressed=true]")?.scrollIntoView({ block: "nearest" });
}

function tell(text) {
  get("about").textContent = text;
}

// --- the mouse ------------------------------------------------------------------------------------------------------

const within = (value, side) => Math.max(0, Math.min(side, Math.round(value)));

// The marks at a place, the smallest first.
function marksAt([x, y]) {
  const slack = 4 / zoom.scale, area = (mark) => (mark.x2 - mark.x1) * (mark.y2 - mark.y1);
  const at = (mark) => x >= mark.x1 - slack && x <= mark.x2 + slack && y >= mark.y1 - slack && y <= mark.y2 + slack;
  return marks.map((mark, n) => n).filter((n) => at(marks[n])).sort((a, b) => area(marks[a]) - area(marks[b]));
}

svg.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || space) return;
  event.preventDefault();
  stage.focus({ preventScroll: true });
  const place = zoom.place(event), mark = marks[selected], grip = event.target.closest(".grip");
  drag = { id: event.pointerId, from: place, at: event, mark, kind: "draw" };
  if (grip) Object.assign(drag, { kind: "resize", edges: [grip.dataset.x, grip.dataset.y] });
  else if (mark && !event.shiftKey && marksAt(place).includes(selected)) drag.kind = "move";
  svg.setPointerCapture(event.pointerId);
});

svg.addEventListener("pointermove", (event) => {
  if (!drag || event.pointerId !== drag.id || frozen) return;
  if (zoom.pinches) return stopDrag();
  if (!drag.moved && Math.hypot(event.clientX - drag.at.clientX, event.clientY - drag.at.clientY) < CLICK) return;
  const place = zoom.place(event);
  if (drag.kind === "move") {
    if (isShape(drag.mark)) return tell("It has an outline or keypoints, and can be relabelled or deleted.");
    const [dx, dy] = place.map((value, n) => Math.round(value - drag.from[n]));
    showDragged({ ...drag.mark, ...moved(drag.mark, dx, dy) });
  } else if (drag.kind === "resize") {
    showDragged(resized(drag.mark, drag.edges, place));
  } else {
    const [x, y] = [within(place[0], width), within(place[1], height)];
    const [a, b] = [within(drag.from[0], width), within(drag.from[1], height)];
    drag.box = { x1: Math.min(a, x), y1: Math.min(b, y), x2: Math.max(a, x), y2: Math.max(b, y) };
    render();
  }
  drag.moved = true;
});

// While a mark is dragged only the picture changes; it is one change at the end.
function showDragged(mark) {
  drag.next = mark;
  marks = marks.map((each, n) => (n === selected ? mark : each));
  render();
}

function moved(mark, dx, dy) {
  const x = Math.max(-mark.x1, Math.min(width - mark.x2, dx)), y = Math.max(-mark.y1, Math.min(height - mark.y2, dy));
  return { x1: mark.x1 + x, x2: mark.x2 + x, y1: mark.y1 + y, y2: mark.y2 + y };
}

function stopDrag() {
  if (drag?.next) marks = marks.map((each, n) => (n === selected ? drag.mark : each));
  drag = null;
  render();
}

svg.addEventListener("pointercancel", stopDrag);
svg.addEventListener("pointerup", (event) => {
  if (!drag || event.pointerId !== drag.id) return;
  const { next, box, moved: hasMoved, from } = drag;
  stopDrag();
  if (next) {
    edit(selected, next);
  } else if (box) {
    if (box.x2 > box.x1 && box.y2 > box.y1) add(box);
  } else if (!hasMoved && !showsTheirs) {
    const here = marksAt(from);
    select(here.length ? here[(here.indexOf(selected) + 1) % here.length] : -1);
  }
});

// --- the keyboard ---------------------------------------------------------------------------------------------------

function press(event) {
  const { key } = event, control = event.ctrlKey || event.metaKey;
  if (control && key.toLowerCase() === "z") return event.shiftKey ? step(redone, undone) : step(undone, redone);
  if (control && key.toLowerCase() === "y") return step(redone, undone);
  if (Object.hasOwn(ARROWS, key)) {
    if (selected < 0) return false;
    const by = event.shiftKey ? 10 : control ? 0.25 : 1, [dx, dy] = ARROWS[key].map((each) => each * by);
    return event.altKey ? stretch(selected, dx, dy) : move(selected, dx, dy, `move ${selected}`);
  }
  if (control || event.altKey) return false;
  if (key === "Tab") {
    if (document.activeElement !== stage) return false;
    const next = selected < 0 && event.shiftKey ? marks.length - 1 : selected + (event.shiftKey ? -1 : 1);
    select(next >= 0 && next < marks.length ? next : -1);
    return selected >= 0 ? undefined : false; // behind the last the focus goes on
  }
  if (key >= "1" && key <= "9" && key.length === 1) return classes[key - 1] && !frozen ? relabel(classes[key - 1][0]) : undefined;
  const onControl = document.activeElement?.closest("a, button, summary, input");
  const act = {
    Delete: () => remove(selected),
    Backspace: () => remove(selected),
    Escape: () => (drag ? stopDrag() : select(-1)),
    Enter: () => (onControl ? false : finish()),
    PageDown: () => go(root.dataset.behind),
    PageUp: () => go(root.dataset.before),
    n: drawInTheMiddle,
    a: () => judge(true, false),
    x: () => judge(false, false),
    A: () => judge(true, true),
    X: () => judge(false, true),
    c: () => get("class").focus(),
    t: () => get("tag")?.focus(),
    v: () => get("was").click(),
    "?": () => (get("keys").open = !get("keys").open),
  };
  return Object.hasOwn(act, key) ? act[key]() : false;
}

document.addEventListener("keydown", (event) => {
  if (event.key === " " && event.target === stage) {
    space = true;
    event.preventDefault();
  }
  if (isTyping(event) || event.defaultPrevented || press(event) === false) return;
  event.preventDefault();
  event.stopPropagation();
}, true);
document.addEventListener("keyup", (event) => event.key === " " && (space = false));

function ownField(id, act) {
  const field = get(id);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      act(field.value);
    } else if (event.key !== "Escape") {
      return;
    }
    field.value = "";
    stage.focus();
    render();
  });
  field.addEventListener("input", render);
}

ownField("class", (text) => {
  const asked = text.trim().toLowerCase();
  const exact = classes.find(([each]) => each.toLowerCase() === asked);
  relabel((exact ?? classes.find(([each]) => asked && each.toLowerCase().startsWith(asked)))?.[0] ?? text);
});
ownField("tag", (text) => {
  const tags = labels ?? wholeLabels;
  if (text.trim() && !tags.includes(text.trim())) change(marks, { tags: [...tags, text.trim()] });
});

const buttons = {
  new: drawInTheMiddle,
  remove: () => remove(selected),
  undo: () => step(undone, redone),
  redo: () => step(redone, undone),
  accept: () => judge(true, false),
  reject: () => judge(false, false),
  "accept-all": () => judge(true, true),
  "reject-all": () => judge(false, true),
  done: () => finish(),
  "show-theirs": () => {
    showsTheirs = !showsTheirs;
    get("show-theirs").setAttribute("aria-pressed", String(showsTheirs));
    render();
  },
  "take-over": () => order({ take_over: true, rev: theirs.rev }),
  discard: () => order({ discard: true, rev: theirs?.rev ?? saver.rev }),
};
get("was").addEventListener("change", render);
for (const [id, act] of Object.entries(buttons)) get(id).addEventListener("click", act);
// The focus stays in the picture, where the keys are.
root.addEventListener("mousedown", (event) => event.target.closest("button") && event.preventDefault());
for (const [id, to] of [["before", "before"], ["behind", "behind"]]) {
  get(id)?.addEventListener("click", (event) => {
    event.preventDefault();
    go(root.dataset[to]);
  });
}

// --- the server -----------------------------------------------------------------------------------------------------

const TOLD = { saved: "Saved", saving: "Saving", failing: "Not saved, trying again: ", refused: "Not saved: " };

function tellState(state, text) {
  const said = get("saved");
  said.textContent = TOLD[state] + (text ? shown(text) : "");
  said.className = state;
}

// Somebody else has the image, or its draft is of another version: nothing is changed until the visitor says how.
function showConflict(answer) {
  frozen = true;
  theirs = answer.draft ?? null;
  get("why").textContent = shown([answer.error, answer.hint].filter(Boolean).join(". "));
  get("conflict").hidden = false;
  get("show-theirs").hidden = !theirs || theirs.stale;
  get("take-over").hidden = !theirs || theirs.stale && theirs.mine;
  get("take-over").textContent = theirs?.mine ? "Take what is saved" : "Take over";
  get("discard").hidden = !theirs?.mine;
  get("anew").hidden = Boolean(theirs);
  render();
}

async function order(what) {
  const answer = await ask(saver.address, saver.csrf, what);
  if (answer.status === 409) return showConflict(answer);
  if (answer.status !== 200) return tellState("refused", answer.error);
  const mine = { marks, labels };
  saver.drop();
  take(answer);
  if (what.take_over && JSON.stringify(mine) !== JSON.stringify({ marks, labels })) {
    undone.push(mine); // the visitor's own marks are one step back
    render();
  }
  stage.focus();
}

// Take up what the server says of the image.
function take(answer) {
  [before, wholeLabels] = [answer.before, answer.labels];
  classes = answer.classes;
  get("whole").hidden = !answer.whole;
  get("predictions").hidden = !before.some((each) => each.score !== null);
  const draft = answer.draft;
  marks = draft && !draft.stale ? draft.objects.map(unpacked) : untouched();
  [labels, done] = draft && !draft.stale ? [draft.labels, draft.done] : [null, false];
  [undone, redone, joined, selected, theirs, showsTheirs] = [[], [], "", -1, null, false];
  addClasses(answer.colours);
  saver.rev = draft?.rev ?? "";
  frozen = !answer.may;
  get("conflict").hidden = true;
  get("discard-own").hidden = !draft?.mine || frozen;
  const untold = draft && !draft.mine ? "Not changed by you" : draft ? `Saved${done ? ", done" : ""}` : "Not changed";
  get("saved").textContent = answer.why || untold;
  if (draft && (!draft.mine || draft.stale)) {
    showConflict({ draft, error: answer.told });
    get("show-theirs").hidden = true; // nothing else is shown
    if (frozen && !answer.may) for (const id of ["take-over", "discard"]) get(id).hidden = true;
  }
  render();
}

function addClasses(colours) {
  for (const [label, colour] of Object.entries(colours ?? {})) {
    const known = classes.find(([each]) => each === label);
    if (known) known[1] = colour;
    else classes.push([label, colour]);
  }
}

async function go(address) {
  if (!address) return tell("There is no other image.");
  if (await saver.flush()) location.assign(address);
  else tell("It is not saved yet: this page stays.");
}

async function finish() {
  if (!frozen) {
    done = true;
    saver.want(body());
    if (!(await saver.flush())) return tell("It is not saved yet: this page stays.");
    get("saved").textContent = "Saved, done";
  }
  const form = get("finish");
  if (form) return form.requestSubmit();
  if (root.dataset.behind) location.assign(root.dataset.behind);
  else tell("Done. This was the last image.");
}

get("discard-own").addEventListener("click", async () => {
  if (saver.dirty && !(await saver.flush())) return;
  order({ discard: true, rev: saver.rev });
});

const zoom = new Zoom(stage, root.querySelector(".picture"), {
  enlarges: 8,
  drags: () => space,
  pans: () => selected < 0,
});
zoom.listeners.push(() => render());

async function load() {
  const { draft: address, csrf } = root.dataset;
  saver = new Saver({
    address, csrf, key: `mark ${address}`, tell: tellState, conflict: showConflict,
    saved: (answer) => {
      addClasses(answer.colours);
      get("discard-own").hidden = false;
      if (answer.lease) {
        get("lease").textContent = shown(answer.lease);
        get("lease").hidden = false;
      }
      render();
    },
  });
  let answer;
  while ((answer = await ask(address, csrf)).status !== 200) {
    tellState(answer.status === 202 ? "saving" : "failing", answer.error ?? "");
    if (answer.status >= 400 && answer.status < 500) return;
    await new Promise((again) => setTimeout(again, answer.status === 202 ? WAIT_MS : 5 * WAIT_MS));
  }
  take(answer);
  const kept = saver.restore();
  if (kept && !theirs?.stale) {
    [marks, labels, done] = [kept.objects.map(unpacked), kept.labels, kept.done];
    get("show-theirs").hidden = !theirs;
    if (!frozen) saver.start(0);
    else tellState("refused", "what you did on this image before is here still.");
    render();
  }
  if (answer.may) stage.focus({ preventScroll: true });
}

load();

// Zoom and pan a picture within a frame that scrolls: wheel, buttons, + - 0, drag, pinch, Shift and arrows. The image
// page has one for what is marked [data-zoom]; the editor makes its own.

import { isTyping } from "/static/page.js";

const MOST = 16; // of the screen's pixels for one of the image
const WIDEST = 60000;
const STEP = 1.25;
const PAN = { ArrowLeft: [-80, 0], ArrowRight: [80, 0], ArrowUp: [0, -80], ArrowDown: [0, 80] };

export class Zoom {
  // `wheels(event)`: whether the wheel zooms; `drags(event)`: whether a pointer pans; `pans()`: whether Shift and arrows do.
  constructor(frame, content, { enlarges = 1, wheels = () => true, drags = () => true, pans = () => true } = {}) {
    Object.assign(this, { frame, content, enlarges, pans });
    [this.width, this.height] = ["width", "height"].map((side) => Number(frame.dataset[side]));
    this.pointers = new Map();
    this.listeners = [];
    this.fitted = true;
    this.addButtons();
    frame.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !wheels(this)) return;
      event.preventDefault();
      this.set(this.scale * Math.exp(-Math.max(-100, Math.min(100, event.deltaY)) / 300), event);
    }, { passive: false });
    frame.addEventListener("pointerdown", (event) => this.down(event, drags));
    frame.addEventListener("pointermove", (event) => this.move(event));
    for (const kind of ["pointerup", "pointercancel"]) frame.addEventListener(kind, (event) => this.pointers.delete(event.pointerId));
    document.addEventListener("keydown", (event) => this.key(event), true);
    new ResizeObserver(() => this.fitted && this.fit()).observe(frame.parentElement);
    this.fit();
  }

  get fitting() {
    const style = getComputedStyle(this.frame);
    const high = style.maxHeight === "none" ? innerHeight : parseFloat(style.maxHeight);
    return Math.min(this.frame.clientWidth / this.width, (high - 4) / this.height, this.enlarges);
  }

  fit() {
    this.apply(this.fitting);
    this.fitted = true;
  }

  set(scale, { clientX, clientY } = this.middle()) {
    const before = this.content.getBoundingClientRect();
    const x = (clientX - before.left) / this.scale, y = (clientY - before.top) / this.scale;
    const most = Math.max(Math.min(MOST, WIDEST / Math.max(this.width, this.height)), this.fitting);
    this.apply(Math.max(Math.min(this.fitting, 1), Math.min(most, scale)));
    this.fitted = false;
    const now = this.content.getBoundingClientRect();
    this.frame.scrollLeft += now.left + x * this.scale - clientX;
    this.frame.scrollTop += now.top + y * this.scale - clientY;
  }

  apply(scale) {
    this.scale = scale;
    this.content.style.width = `${this.width * scale}px`;
    this.content.style.height = `${this.height * scale}px`;
    this.said.textContent = `${Math.round(scale * 100)} %`;
    for (const listener of this.listeners) listener();
  }

  middle() {
    const at = this.frame.getBoundingClientRect();
    return { clientX: at.left + at.width / 2, clientY: at.top + at.height / 2 };
  }

  // The place in the image that is at a place of the window.
  place({ clientX, clientY }) {
    const at = this.content.getBoundingClientRect();
    return [(clientX - at.left) / this.scale, (clientY - at.top) / this.scale];
  }

  get pinches() {
    return this.pointers.size > 1;
  }

  down(event, drags) {
    const pans = drags(event) || event.button === 1;
    if (!pans && event.pointerType !== "touch") return;
    if (event.pointerType !== "touch") event.preventDefault();
    if (event.button > 1) return;
    this.pointers.set(event.pointerId, { clientX: event.clientX, clientY: event.clientY, pans });
    if (pans && event.pointerType !== "touch") this.frame.setPointerCapture(event.pointerId);
  }

  move(event) {
    const last = this.pointers.get(event.pointerId);
    if (!last) return;
    const { clientX, clientY } = event;
    if (this.pinches) {
      const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, each]) => each);
      const apart = (each) => Math.hypot(each.clientX - other.clientX, each.clientY - other.clientY) || 1;
      const middle = { clientX: (clientX + other.clientX) / 2, clientY: (clientY + other.clientY) / 2 };
      this.frame.scrollLeft -= (clientX - last.clientX) / 2;
      this.frame.scrollTop -= (clientY - last.clientY) / 2;
      this.set((this.scale * apart(event)) / apart(last), middle);
    } else if (last.pans && event.pointerType !== "touch") {
      this.frame.scrollLeft -= clientX - last.clientX;
      this.frame.scrollTop -= clientY - last.clientY;
    }
    Object.assign(last, { clientX, clientY });
  }

  key(event) {
    if (isTyping(event) || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.shiftKey && event.key in PAN && this.pans()) {
      this.frame.scrollBy(...PAN[event.key]);
    } else if (event.key === "+" || event.key === "=") {
      this.set(this.scale * STEP);
    } else if (event.key === "-") {
      this.set(this.scale / STEP);
    } else if (event.key === "0") {
      this.fit();
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  addButtons() {
    const bar = document.createElement("p");
    bar.className = "zoomer";
    const button = (text, label, act) => {
      const made = document.createElement("button");
      Object.assign(made, { type: "button", textContent: text, title: label });
      made.setAttribute("aria-label", label);
      made.addEventListener("click", act);
      bar.append(made, " ");
    };
    button("−", "Smaller (-)", () => this.set(this.scale / STEP));
    button("+", "Larger (+)", () => this.set(this.scale * STEP));
    button("Fit", "The whole image (0)", () => this.fit());
    button("1:1", "Pixel by pixel", () => this.set(1));
    this.said = document.createElement("output");
    bar.append(this.said);
    this.frame.before(bar);
  }
}

for (const frame of document.querySelectorAll("[data-zoom]")) {
  new Zoom(frame, frame.querySelector(".picture"), { enlarges: 4, wheels: (zoom) => !zoom.fitted });
}

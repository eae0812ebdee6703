// Select images of a grid: boxes on tiles, kept from page to page in this tab. A path stays as it is written in links,
// which also hold names that are no text.

import { isTyping } from "/static/page.js";

const MOST = 5000;
const panel = document.querySelector("#selection");
const form = panel.querySelector("form");
const key = `select ${form.action}`;
const get = (id) => panel.querySelector(`#${id}`);
let chosen = new Set(JSON.parse(sessionStorage.getItem(key) ?? "[]"));
let last = -1; // the tile that was chosen last on this page

const boxes = () => [...document.querySelectorAll(".grid .pick input")];

// Put a box on each tile.
function decorate() {
  last = -1;
  for (const link of document.querySelectorAll(".grid li > a[href*='path=']")) {
    if (link.parentElement.querySelector(".pick")) continue;
    const label = document.createElement("label"), box = document.createElement("input");
    label.className = "pick";
    box.type = "checkbox";
    box.dataset.path = link.getAttribute("href").match(/[?&]path=([^&]*)/)[1];
    box.setAttribute("aria-label", `Select ${link.querySelector("bdi").textContent}`);
    label.append(box);
    link.before(label);
  }
  show();
}

function show() {
  for (const box of boxes()) box.checked = chosen.has(box.dataset.path);
  const total = Number(document.querySelector(".grid")?.dataset.total ?? 0).toLocaleString("en");
  const number = chosen.size.toLocaleString("en");
  get("chosen").textContent = chosen.size ? `${number} selected` : "Select images";
  get("those").textContent = `The ${number} selected`;
  get("every").textContent = `All ${total} that the filter means`;
}

function choose(some, is) {
  for (const box of some) {
    if (!is) chosen.delete(box.dataset.path);
    else if (chosen.size < MOST) chosen.add(box.dataset.path);
    else tell(`At most ${MOST.toLocaleString("en")} images are selected one by one. A filter can mean more.`);
  }
  try {
    sessionStorage.setItem(key, JSON.stringify([...chosen]));
  } catch {
    // A full storage: the selection lasts for this page.
  }
  show();
}

function tell(text) {
  get("failed").textContent = text;
  get("failed").hidden = !text;
}

document.addEventListener("click", (event) => {
  const box = event.target.closest(".pick input");
  if (!box) return;
  const all = boxes(), here = all.indexOf(box);
  const run = event.shiftKey && last >= 0 ? all.slice(Math.min(here, last), Math.max(here, last) + 1) : [box];
  last = here;
  choose(run, box.checked);
});

const choosePage = () => choose(boxes(), !boxes().every((box) => box.checked));

document.addEventListener("keydown", (event) => {
  if (isTyping(event)) return;
  if ((event.ctrlKey || event.metaKey) && event.key === "a" && boxes().length) {
    event.preventDefault();
    choosePage();
  }
});

get("page").addEventListener("click", choosePage);
get("clear").addEventListener("click", () => {
  chosen = new Set();
  choose([], true);
});

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  tell("");
  const sent = new URLSearchParams(new FormData(form, event.submitter));
  if (sent.get("all")) sent.set("filter", location.search.slice(1));
  const body = [sent, ...(sent.get("all") ? [] : [...chosen].map((path) => `path=${path}`))].join("&");
  const headers = { "content-type": "application/x-www-form-urlencoded" };
  try {
    const answer = await fetch(form.action, { method: "POST", headers, body });
    if (answer.redirected) return location.assign(answer.url);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    tell((page.querySelector("[role=alert]") ?? page.body).textContent);
  } catch {
    tell("The server does not answer. Nothing was made.");
  }
});

document.addEventListener("htmx:afterSwap", decorate);
decorate();

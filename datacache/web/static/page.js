// Keys: arrows go to the page or image before and behind, b hides and shows boxes, / goes to the filter.

// Tell whether a key is meant for a field.
export const isTyping = (event) => event.target.closest?.("input:not([type=checkbox]), select, textarea, dialog");

const goToFilter = () => {
  document.querySelector(".filters")?.setAttribute("open", "");
  document.querySelector(".filter :is(input, select), .search input")?.focus();
};

const press = {
  ArrowLeft: () => document.querySelector("a[rel=prev]")?.click(),
  ArrowRight: () => document.querySelector("a[rel=next]")?.click(),
  Escape: () => document.querySelector("a[rel=up]")?.click(),
  b: () => document.querySelector("#hide")?.click(),
  "/": goToFilter,
};

document.addEventListener("keydown", (event) => {
  if (isTyping(event) || event.ctrlKey || event.altKey || event.metaKey || !Object.hasOwn(press, event.key)) return;
  event.preventDefault();
  press[event.key]();
});

// What cannot be undone is done only when that is confirmed.
document.addEventListener("click", (event) => {
  const question = event.target.closest?.("[data-ask]")?.dataset.ask;
  if (!question || confirm(question)) return;
  event.preventDefault();
  event.stopImmediatePropagation();
}, true);

// Boxes stay hidden from page to page, in this tab.
const hide = () => document.querySelector("#hide");
const remember = () => {
  if (hide()) hide().checked = sessionStorage.getItem("hide") === "1";
};
document.addEventListener("change", (event) => {
  if (event.target.id === "hide") sessionStorage.setItem("hide", event.target.checked ? "1" : "0");
});
document.addEventListener("htmx:afterSwap", remember);
remember();

// Whoever goes on by a link that is exchanged for its page goes on with Tab among what was found, not from the top.
document.addEventListener("htmx:afterSettle", () => {
  if (document.activeElement === document.body) document.querySelector(".results")?.focus({ preventScroll: true });
});

// What stands beside the rest on a wide screen is open there, and closed on a phone.
if (matchMedia("(min-width: 60rem)").matches) {
  for (const each of document.querySelectorAll("details[data-wide]")) each.open = true;
}

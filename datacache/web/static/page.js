// Keys: arrows go to the page or image before and behind, b hides and shows boxes, / goes to the filter.

const press = {
  ArrowLeft: () => document.querySelector("a[rel=prev]")?.click(),
  ArrowRight: () => document.querySelector("a[rel=next]")?.click(),
  Escape: () => document.querySelector("a[rel=up]")?.click(),
  b: () => document.querySelector("#hide")?.click(),
  "/": () => document.querySelector(".filter input, .filter select")?.focus(),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=checkbox]), select, textarea");
  if (typing || event.ctrlKey || event.altKey || event.metaKey || !Object.hasOwn(press, event.key)) return;
  event.preventDefault();
  press[event.key]();
});

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

// Keys of a compared image: 1 shows what was before, 2 what is after, 3 both. The choice stays from image to image.

import { isTyping } from "/static/page.js";

const choose = (value) => {
  const radio = document.querySelector(`#side-${value}`);
  if (radio) radio.checked = true;
};

document.addEventListener("keydown", (event) => {
  const typing = isTyping(event) && event.target.type !== "radio";
  if (typing || event.ctrlKey || event.altKey || event.metaKey || !["1", "2", "3"].includes(event.key)) return;
  choose(event.key);
  sessionStorage.setItem("side", event.key);
});
document.addEventListener("change", (event) => {
  if (event.target.name === "side") sessionStorage.setItem("side", event.target.value);
});
choose(sessionStorage.getItem("side") ?? "3");

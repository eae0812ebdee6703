// The node's page looks again every two seconds, while somebody sees it. What was unfolded stays so.

const node = document.querySelector("#node");
const away = document.querySelector("#node-away");

setInterval(() => {
  if (document.visibilityState === "visible") htmx.trigger(node, "look");
}, 2000);

let open = [];
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.xhr.status !== 200) event.detail.shouldSwap = false;
  open = [...node.querySelectorAll("details[open]")].map((each) => each.id);
});
document.addEventListener("htmx:afterSwap", () => {
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
});

document.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.requestConfig.verb === "get") away.hidden = event.detail.successful;
});

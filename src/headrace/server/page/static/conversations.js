// The list of conversations at the side.
import { $, h, say } from "/page/dom.js";
import { button } from "/page/buttons.js";
import { t } from "/page/texts.js";

const SECONDS = 6; // to undo a deletion

export function drawConversations(chat, open) {
  const items = chat.list.map((one) => {
    const title = one.title || t("untitled");
    const link = h("button", { type: "button", className: "title", title, onclick: () => open(one) }, title);
    if (one === chat.now) link.setAttribute("aria-current", "true");
    const bin = button("bin", "remove", () => undoable(chat.remove(one)));
    bin.title = t("remove", { title });
    bin.setAttribute("aria-label", bin.title);
    return h("li", {}, link, bin);
  });
  $("#conversations").replaceChildren(...(items.length ? items : [h("li", { className: "faint" }, t("noConversations"))]));
}

function undoable(undo) {
  $("#toast")?.remove();
  const toast = h("div", { id: "toast" }, h("span", {}, t("removed")), h("button", { type: "button", onclick: () => { undo(); toast.remove(); } }, t("undo")));
  document.body.append(toast);
  say(t("removed"));
  setTimeout(() => toast.remove(), SECONDS * 1000);
}

export function notice(text) {
  $("#toast")?.remove();
  const toast = h("div", { id: "toast", role: "alert" }, h("span", {}, text), h("button", { type: "button", onclick: () => toast.remove() }, t("close")));
  document.body.append(toast);
}

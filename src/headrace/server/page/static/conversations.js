// The list of conversations at the side: search, rename, export, delete.
import { button } from "/page/buttons.js";
import { $, h } from "/page/dom.js";
import { download } from "/page/export.js";
import { icon } from "/page/icons.js";
import { t } from "/page/texts.js";

const SECONDS = 6; // to undo a deletion

export class Conversations {
  /** `chat`, and what gives a conversation's address. */
  constructor(chat, address) {
    this.chat = chat;
    this.address = address;
    this.renamed = null; // the one whose title is being written
    $("#search").addEventListener("input", () => this.draw());
  }

  draw() {
    const wanted = $("#search").value.trim().toLowerCase();
    const found = this.chat.list.filter((one) => contains(one, wanted));
    $("#search").hidden = !this.chat.list.length;
    const none = h("li", { className: "faint" }, t(this.chat.list.length ? "notFound" : "noConversations"));
    if (this.renamed && $("#conversations input")) return; // not away from under the writer
    $("#conversations").replaceChildren(...(found.length ? found.map((one) => this.item(one)) : [none]));
  }

  item(one) {
    if (one === this.renamed) return h("li", {}, this.field(one));
    const title = one.title || t("untitled");
    const link = h("a", { className: "title", title, href: this.address(one) }, title);
    if (one === this.chat.now) link.setAttribute("aria-current", "true");
    if (this.chat.jobs.has(one)) link.append(h("i", { className: "busy", role: "img", "aria-label": t("answering") }));
    const more = button("more", "more", () => this.menu(one, more), { "aria-haspopup": "true" }, { title });
    return h("li", {}, link, more);
  }

  menu(one, from) {
    const menu = $("#menu");
    const entry = (name, text, act) => h("button", { type: "button", onclick: () => { menu.hidePopover(); act(); } }, icon(name), h("span", {}, t(text)));
    menu.replaceChildren(
      entry("edit", "rename", () => this.rename(one)),
      entry("save", "exportMarkdown", () => download(one, "md")),
      entry("save", "exportJson", () => download(one, "json")),
      entry("bin", "remove", () => undoable(this.chat.remove(one))),
    );
    menu.showPopover();
    const [box, size] = [from.getBoundingClientRect(), menu.getBoundingClientRect()];
    menu.style.left = `${Math.max(8, Math.min(box.left, innerWidth - size.width - 8))}px`;
    menu.style.top = `${Math.max(8, Math.min(box.bottom + 4, innerHeight - size.height - 8))}px`;
    menu.firstChild.focus();
  }

  rename(one) {
    this.renamed = one;
    this.draw();
    const field = $("#conversations input");
    field.focus();
    field.select();
  }

  field(one) {
    const field = h("input", { className: "rename", value: one.title, "aria-label": t("rename") });
    const done = (keep) => {
      if (this.renamed !== one) return;
      this.renamed = null;
      field.remove();
      const title = field.value.trim();
      if (keep && title) this.chat.rename(one, title);
      else this.draw();
    };
    field.addEventListener("blur", () => done(true));
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      if (event.isComposing) return;
      event.stopPropagation();
      event.preventDefault();
      done(event.key === "Enter");
    });
    return field;
  }
}

function contains(one, wanted) {
  if (!wanted) return true;
  return [one.title, ...one.messages.map((message) => message.content)].some((text) => text.toLowerCase().includes(wanted));
}

function undoable(undo) {
  $("#toast")?.remove();
  const toast = h("div", { id: "toast", role: "status" }, h("span", {}, t("removed")), h("button", { type: "button", onclick: () => { undo(); toast.remove(); } }, t("undo")));
  document.body.append(toast);
  setTimeout(() => toast.remove(), SECONDS * 1000);
}

export function notice(text) {
  $("#toast")?.remove();
  const toast = h("div", { id: "toast", role: "alert" }, h("span", {}, text), h("button", { type: "button", onclick: () => toast.remove() }, t("close")));
  document.body.append(toast);
}

// The page: what is shown, and what keys and buttons do.
import { getJson } from "/page/api.js";
import { attachable } from "/page/attach.js";
import { Chat } from "/page/chat.js";
import { Conversations, notice } from "/page/conversations.js";
import { drawDashboard } from "/page/dashboard.js";
import { $, h } from "/page/dom.js";
import { read } from "/page/export.js";
import { Watch } from "/page/figures.js";
import { icon } from "/page/icons.js";
import { drawPanel } from "/page/panel.js";
import { Dictation } from "/page/record.js";
import { early } from "/page/request.js";
import { key, look, saveLook, setKey } from "/page/storage.js";
import { language, number, t, translate } from "/page/texts.js";

const PHONE = matchMedia("(max-width: 60rem)");
const WIDE = matchMedia("(min-width: 90rem)"); // room for the settings
let models = []; // as /v1/models has them
let model = "";
let state = "unknown";

const address = (one) => (one ? `#chat/${one.id}` : "#chat");

const chat = new Chat({
  changed: () => { list.draw(); name(); },
  opened: (one) => { history.replaceState(null, "", address(one)); route(); },
  back: (text) => { prompt.value = [text, prompt.value].filter((part) => part).join("\n"); grow(); prompt.focus(); },
  full: () => notice(t("full")),
  key: (wrong) => askKey(wrong),
  look: () => watch.ask(),
  model: () => model,
  early: () => early(models.find((one) => one.id === model)),
});
const list = new Conversations(chat, address);

const dictation = new Dictation({ into: addSpoken, refuse: (text) => notice(text) });

const watch = new Watch(showState, (history) => {
  if (document.body.dataset.view === "dashboard") drawDashboard(history);
});

// -- views ------------------------------------------------------------------------------------------------------------
/** Show what the address names: #dashboard, #chat or #chat/ID. */
function route() {
  const [named, id] = location.hash.slice(1).split("/");
  const view = named === "dashboard" ? "dashboard" : "chat";
  document.body.dataset.view = view;
  $("#chat").hidden = view !== "chat";
  $("#dashboard").hidden = view !== "dashboard";
  for (const one of ["chat", "dashboard"]) $(`#to-${one}`).toggleAttribute("aria-current", one === view);
  watch.period = view === "dashboard" ? 1000 : 2000;
  side(false);
  if (view === "dashboard") drawDashboard(watch.history);
  else {
    const one = id ? chat.find(id) : null;
    if (id && !one) notice(t("unknownAddress"));
    if (one !== chat.now) chat.open(one);
    $("#to-chat").href = address(one);
  }
  name();
  watch.ask();
}

/** The window is called after what it shows. */
function name() {
  document.title = [chat.now?.title, model, "Headrace"].filter((part) => part).join(" · ");
}

function openConversation(one) {
  if (location.hash === address(one)) route();
  else location.hash = address(one);
  if (!PHONE.matches) prompt.focus();
}

function side(open) {
  document.body.classList.toggle("side-open", open);
  $("#veil").hidden = !open;
}

function panel(open) {
  $("#panel").hidden = !open;
  $("#open-panel").setAttribute("aria-expanded", String(open));
  if (open) drawPanel(models.find((one) => one.id === model), () => { keepPanel(false); $("#open-panel").focus(); });
}

function keepPanel(open) {
  look.panel = open;
  saveLook();
  panel(open);
}

// -- the server -------------------------------------------------------------------------------------------------------
async function showState(now, health, error) {
  const before = state;
  if ((now === "ready" && before !== "ready") || !model) await findModels(); // first: whoever sees it ready may write, and a message names its model
  else if (now === "ready" && models.some((one) => one.mode === "on demand")) await lookAtModels();
  state = now;
  $("#status").dataset.state = now;
  showStatus();
  $("#status").title = health.detail || t(now);
  if (now === "locked" && before !== "locked") askKey(!!key());
}

/** The state of the server, or how far the chosen model is loaded. */
function showStatus() {
  const one = models.find((one) => one.id === model);
  const loads = state === "ready" && one?.state === "loading";
  $("#status span").textContent = loads ? t("modelLoads", { model, n: Math.round(100 * (one.progress ?? 0)) }) : t(state);
}

/** The name of a model in the list, with its state if it is not in memory. */
const entry = (one) => (one.state && one.state !== "loaded" ? `${one.id} · ${t(`model_${one.state}`)}` : one.id);

/** Which models are in memory: the list stays as it is, except for its words. */
async function lookAtModels() {
  const before = models;
  try {
    models = await askModels();
  } catch {
    return;
  }
  if (models.length !== before.length) return findModels();
  for (const option of $("#models").options) {
    const one = models.find((one) => one.id === option.value);
    if (one && option.textContent !== entry(one)) option.textContent = entry(one);
  }
  const known = (all) => all.find((one) => one.id === model)?.max_model_len;
  if (known(before) !== known(models)) chosen();
}

/** The models that write: those that transcribe sound fill the composer. A server of speech alone shows these. */
async function askModels() {
  const all = (await getJson("/v1/models")).data;
  const writers = all.filter((one) => !one.transcribes);
  dictation.serve(all.find((one) => one.transcribes)?.id ?? "");
  return writers.length ? writers : all;
}

async function findModels() {
  try {
    models = await askModels();
  } catch {
    return;
  }
  model = models.some((one) => one.id === model) ? model : (models[0]?.id ?? "");
  $("#model").textContent = model;
  $("#model").hidden = models.length > 1;
  $("#models").hidden = models.length < 2;
  $("#models").replaceChildren(...models.map((one) => h("option", { value: one.id, selected: one.id === model }, entry(one))));
  chosen();
}

/** How many tokens the model takes, where that is known. */
const context = () => models.find((one) => one.id === model)?.max_model_len;

/** Another model, or one that tells more of itself. */
function chosen() {
  words();
  name();
  if (!$("#panel").hidden && !$("#panel").contains(document.activeElement)) panel(true);
}

function askKey(wrong) {
  const dialog = $("#key-dialog");
  if (dialog.open) return;
  $("#key-why").textContent = t(wrong && key() ? "keyWrong" : "keyText");
  $("#key-why").classList.toggle("wrong", !!(wrong && key()));
  $("#key-value").value = key();
  dialog.showModal();
  $("#key-value").select();
}

$("#key-dialog").addEventListener("close", () => {
  if ($("#key-dialog").returnValue !== "yes") return;
  setKey($("#key-value").value.trim(), $("#key-keep").checked);
  state = "unknown";
  watch.ask();
});
// Enter is "Use", not the first button of the form
$("#key-value").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  $("#key-dialog").close("yes");
});

// -- words and colours ------------------------------------------------------------------------------------------------
function words() {
  translate();
  const theme = t({ auto: "themeAuto", light: "themeLight", dark: "themeDark" }[look.theme]);
  $("#theme b").textContent = theme;
  if (look.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = look.theme;
  const room = context();
  $("#empty p").textContent = [model ? t("emptyText", { model }) : t("emptyTextNoModel"), room && t("room", { n: number(room) })].filter((part) => part).join(" ");
  $("#ideas").replaceChildren(...t("ideas").map((idea) => h("button", { type: "button", onclick: () => submit(idea) }, idea)));
  $("#keys").replaceChildren(...t("keys").flatMap(([keys, what]) => [h("dt", {}, ...keys.split("+").map((one) => h("kbd", {}, one))), h("dd", {}, what)]));
  showStatus();
  list.draw();
}

$("#theme").addEventListener("click", () => {
  look.theme = { auto: "light", light: "dark", dark: "auto" }[look.theme];
  saveLook();
  words();
});

$("#language").addEventListener("click", () => {
  look.language = language() === "en" ? "zh" : "en";
  saveLook();
  words();
  chat.views.clear();
  chat.show();
  if (!$("#panel").hidden) panel(true);
  if (document.body.dataset.view === "dashboard") drawDashboard(watch.history);
});

// -- the message ------------------------------------------------------------------------------------------------------
const prompt = $("#prompt");

function submit(text) {
  if (!chat.send(text)) return;
  prompt.value = "";
  grow();
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight * 0.4)}px`;
  $("#send").disabled = !prompt.value.trim();
}

/** A file's text after what is written already; the next word goes under it. */
function addText(text) {
  prompt.value = `${[prompt.value.trimEnd(), text].filter((part) => part).join("\n\n")}\n\n`;
  grow();
  prompt.focus();
  prompt.setSelectionRange(prompt.value.length, prompt.value.length);
  prompt.scrollTop = prompt.scrollHeight;
}

prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit(prompt.value);
  } else if (event.key === "ArrowUp" && !prompt.value) {
    event.preventDefault();
    chat.editLast();
  }
});
$("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit(prompt.value);
});
/** What was spoken goes on where the message ends. */
function addSpoken(text) {
  prompt.value = [prompt.value.trimEnd(), text].filter((part) => part).join(" ");
  grow();
  prompt.focus();
}

$("#attach").addEventListener("click", () => $("#attached").click());
attachable({
  chooser: $("#attached"), field: prompt, place: $("#chat"), room: context, open: () => !$("#chat").hidden && !$("dialog[open]"),
  into: addText, refuse: (name, values) => notice(t(name, values)), sound: (file) => dictation.take(file),
});
$("#stop").addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});

// -- keys -------------------------------------------------------------------------------------------------------------
const ALT = {
  KeyA: () => $("#chat").hidden || $("#attached").click(),
  KeyN: () => openConversation(null),
  KeyS: () => keepPanel($("#panel").hidden),
  KeyD: () => { location.hash = document.body.dataset.view === "chat" ? "#dashboard" : address(chat.now); },
  KeyR: () => chat.again(),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches?.("input, textarea, select");
  if (event.altKey && !event.ctrlKey && !event.metaKey && ALT[event.code]) {
    event.preventDefault();
    ALT[event.code]();
  } else if (event.key === "Escape" && !$("dialog[open], #menu:popover-open, #search:focus")) {
    if (chat.job) chat.stop();
    else side(false);
  } else if (!typing && !event.ctrlKey && !event.metaKey && (event.key === "/" || event.key === "?")) {
    event.preventDefault();
    if (event.key === "/") prompt.focus();
    else $("#help-dialog").showModal();
  }
});

// -- begin ------------------------------------------------------------------------------------------------------------
for (const place of document.querySelectorAll("[data-icon]")) place.replaceWith(icon(place.dataset.icon));
$("#new").addEventListener("click", () => openConversation(null));
$("#load").addEventListener("click", () => $("#file").click());
$("#file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  target.value = ""; // the same file may be chosen again
  if (!file) return;
  try {
    const { title, messages, system } = await read(file);
    chat.take(title, messages);
    if (system) notice(t("systemLeft", { system }));
  } catch {
    notice(t("notConversation", { name: file.name }));
  }
});
$("#open-side").addEventListener("click", () => side(true));
$("#veil").addEventListener("click", () => side(false));
$("#open-panel").addEventListener("click", () => keepPanel($("#panel").hidden));
$("#open-help").addEventListener("click", () => $("#help-dialog").showModal());
$("#open-key").addEventListener("click", () => askKey(false));
$("#models").addEventListener("change", (event) => { model = event.target.value; chosen(); });
addEventListener("hashchange", route);

words();
chat.open(null);
panel((look.panel ?? WIDE.matches) && !PHONE.matches);
grow();
route();
if (!PHONE.matches) prompt.focus();

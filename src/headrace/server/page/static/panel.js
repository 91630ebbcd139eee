// The sampling panel. A field left empty is what the server says is in force, and where that comes from.
import { button } from "/page/buttons.js";
import { $, h } from "/page/dom.js";
import { early } from "/page/request.js";
import { DEFAULTS, saveSettings, settings } from "/page/storage.js";
import { has, t } from "/page/texts.js";

// name, least, most (null: the slider's end is not the last value), step, where the slider ends
const NUMBERS = [
  ["temperature", 0, 2, 0.05], ["top_p", 0.05, 1, 0.05], ["top_k", 0, null, 1, 200], ["min_p", 0, 0.5, 0.01],
  ["repetition_penalty", 0.8, 2, 0.05], ["max_tokens", 1, null, 1, 4096],
];

const NEUTRAL = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1 };

/** `model`: as /v1/models has it; its `defaults`, {name: {value, origin, of}}, are in force where nothing is set. */
export function drawPanel(model, close) {
  const defaults = model?.defaults;
  const panel = $("#panel");
  const reset = h("button", { type: "button", onclick: () => { Object.assign(settings, DEFAULTS); saveSettings(); drawPanel(model, close); } }, t("reset"));
  panel.replaceChildren(
    h("div", { className: "head" }, h("h2", {}, t("settings")), button("close", "close", close)),
    text("system", t("system"), t("systemHint"), 4),
    ...NUMBERS.map(([name, ...row]) => numeric(name, inForce(defaults, name), ...row)),
    seed(),
    ...[early(model)].filter(Boolean).map((name) => numeric(name, undefined, 0, 1, 0.01)),
    text("stop", t("stopAt"), t("stopAtHint"), 2),
    check("tokens", t("askTokens"), t("askTokensHint")),
    reset,
  );
}

/** What is in force of a setting, where that is known. What a server that tells leaves out does nothing. */
function inForce(defaults, name) {
  if (!defaults || !(name in NEUTRAL)) return undefined;
  return defaults[name] ?? { value: NEUTRAL[name], origin: "neutral" };
}

function set(name, value) {
  settings[name] = value;
  saveSettings();
}

function numeric(name, usual, min, max, step, end = max) {
  const origin = usual && (has(`origin_${usual.origin}`) ? t(`origin_${usual.origin}`) : usual.origin);
  const placeholder = usual ? t("inForce", { value: usual.value, origin }) : t(name.endsWith("_threshold") ? "none" : "own");
  const field = h("input", { type: "number", id: `set-${name}`, min, max, step, value: settings[name] ?? "", placeholder, inputMode: "decimal", title: usual?.of });
  const slider = h("input", { type: "range", min, max: end, step, "aria-label": t(name) });
  const range = wrong(max === null ? t("rangeLeast", { min }) : t("rangeBoth", { min, max }));
  const paint = () => {
    const value = settings[name] ?? usual?.value;
    slider.value = value ?? min;
    slider.classList.toggle("unset", settings[name] === null);
    slider.classList.toggle("unknown", value == null);
    slider.setAttribute("aria-valuetext", settings[name] ?? placeholder);
    slider.style.setProperty("--at", value == null ? 0 : (slider.value - min) / (end - min));
  };
  field.addEventListener("input", () => {
    const { valid, badInput, rangeOverflow, rangeUnderflow } = field.validity;
    const good = valid || (step < 1 && !badInput && !rangeOverflow && !rangeUnderflow); // between two steps is as good
    range.say(field, !good);
    if (!good) return;
    set(name, field.value === "" ? null : Number(field.value));
    paint();
  });
  slider.addEventListener("input", () => {
    field.value = slider.value;
    range.say(field, false);
    set(name, Number(slider.value));
    paint();
  });
  paint();
  return h("div", { className: "field" }, h("label", { htmlFor: field.id }, t(name)), field, range.node, slider, h("p", {}, t(`${name}Hint`)));
}

/** The allowed range, shown beside a value that is refused. */
function wrong(range) {
  const node = h("p", { className: "range", hidden: true, role: "alert" }, range);
  const say = (field, bad) => {
    field.setAttribute("aria-invalid", String(bad));
    node.hidden = !bad;
  };
  return { node, say };
}

function seed() {
  const field = h("input", { type: "text", id: "set-seed", inputMode: "numeric", pattern: "[0-9]{1,15}", value: settings.seed ?? "", placeholder: t("none") });
  const range = wrong(t("seedRange"));
  field.addEventListener("input", () => {
    const good = field.validity.valid;
    range.say(field, !good);
    if (good) set("seed", field.value === "" ? null : Number(field.value));
  });
  return h("div", { className: "field" }, h("label", { htmlFor: field.id }, t("seed")), field, range.node, h("p", {}, t("seedHint")));
}

function text(name, label, hint, rows) {
  const field = h("textarea", { id: `set-${name}`, rows, value: settings[name], placeholder: hint });
  field.addEventListener("input", () => set(name, field.value));
  return h("div", { className: "field" }, h("label", { htmlFor: `set-${name}` }, label), field);
}

function check(name, label, hint) {
  const box = h("input", { type: "checkbox", id: `set-${name}`, checked: settings[name], onchange: () => set(name, box.checked) });
  return h("div", { className: "field" }, h("label", { className: "check" }, box, label), h("p", {}, hint));
}

// Several answers to one message: "Again" keeps the earlier ones, and the last answer can be switched between them.
import { h } from "/page/dom.js";
import { button } from "/page/buttons.js";
import { t } from "/page/texts.js";

const FIELDS = ["content", "thought", "tokens", "figures", "finish", "stopped", "cut", "error", "model", "cascade"];

const copy = (message) => Object.fromEntries(FIELDS.filter((name) => name in message).map((name) => [name, message[name]]));

/** The versions that a new answer in place of `message` begins with. */
export function keptFrom(message) {
  if (!message?.content) return message?.versions ?? [];
  record(message);
  return message.versions;
}

/** Write an answer that has ended, or was continued, into its versions. */
export function record(message) {
  message.versions ??= [];
  message.version ??= message.versions.length;
  message.versions[message.version] = copy(message);
}

/** Put another version in place. */
function choose(message, version) {
  for (const name of FIELDS) delete message[name];
  Object.assign(message, message.versions[version], { version });
}

/** Arrows and "1/2"; null for an answer without other versions. `changed()`: another one is in place. */
export function versionPicker(message, changed) {
  const count = message.versions?.length ?? 0;
  if (count < 2) return null;
  const turn = (step) => () => {
    choose(message, message.version + step);
    changed();
  };
  return h(
    "span", { className: "versions" },
    button("left", "earlierVersion", turn(-1), { disabled: message.version === 0 }),
    h("span", {}, `${message.version + 1}/${count}`),
    button("right", "laterVersion", turn(1), { disabled: message.version === count - 1 }),
  );
}

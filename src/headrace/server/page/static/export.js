// A conversation as a file, and back.
import { h } from "/page/dom.js";
import { split } from "/page/thoughts.js";
import { t } from "/page/texts.js";

/** For people. */
function asMarkdown(one) {
  const parts = one.messages.filter((message) => message.content).map((message) => {
    const who = message.role === "user" ? t("you") : (message.model ?? t("answer"));
    return `**${who}**\n\n${message.role === "user" ? message.content : split(message).text}\n`;
  });
  return [`# ${one.title}\n`, ...parts].join("\n");
}

/** For programs: messages as the API takes them, and beside them what is known of the answers. */
function asJson(one) {
  const messages = one.messages.filter((message) => message.content);
  const answers = messages.filter((message) => message.role === "assistant");
  return JSON.stringify({
    title: one.title, made: new Date(one.made).toISOString(), messages: messages.map(({ role, content }) => ({ role, content })),
    answers: answers.map(({ model, finish, thought, figures }) => ({ model, finish_reason: finish, reasoning_content: thought, ...figures })),
  }, null, 2);
}

const KINDS = { md: [asMarkdown, "text/markdown"], json: [asJson, "application/json"] };

/** Let the browser save it; `kind` is md or json. */
export function download(one, kind) {
  const [make, type] = KINDS[kind];
  const url = URL.createObjectURL(new Blob([make(one)], { type }));
  const name = one.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
  h("a", { href: url, download: `${name}.${kind}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const LARGEST = 8 << 20; // bytes of a file; the browser keeps less

/** A conversation from a file: the JSON from above, or what /save of `headrace chat` writes. Throws where it is neither. */
export async function read(file) {
  if (file.size > LARGEST) throw new RangeError("too large");
  const data = JSON.parse(await file.text());
  const said = data.messages.filter((one) => one.role !== "system");
  const right = (one) => ["user", "assistant"].includes(one.role) && typeof one.content === "string" && one.content;
  if (!said.length || !said.every(right)) throw new TypeError("no conversation");
  const answers = Array.isArray(data.answers) ? [...data.answers] : [];
  const messages = said.map(({ role, content }) => (role === "user" ? { role, content } : { role, content, ...known(answers.shift() ?? data) }));
  const title = text(data.title) || (said.find((one) => one.role === "user") ?? said[0]).content;
  const system = text(data.system) || text(data.messages.find((one) => one.role === "system")?.content);
  return { title, messages, system };
}

/** Of an answer in a file; whatever is not of its kind is left out. */
function known({ model, finish_reason: finish, reasoning_content: thought, ...rest }) {
  const figures = Object.fromEntries(["tokens", "prompt", "cached", "ttft", "speed"].map((name) => [name, number(rest[name])]));
  return { model: text(model) || undefined, finish: text(finish) || undefined, thought: text(thought) || undefined, figures: figures.tokens ? figures : null };
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : null);

// A conversation as a file.
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

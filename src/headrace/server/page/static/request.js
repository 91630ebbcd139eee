// What is asked of the server for a conversation.
import { getJson } from "/page/api.js";
import { settings } from "/page/storage.js";
import { ALTERNATIVES } from "/page/tokens.js";

const SENT = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

/** Roles and texts, with the system prompt first. */
function said(messages) {
  const tooLong = (place) => messages[place + 1]?.error?.kind === "long"; // it got no answer, and none after it would fit
  const list = messages.filter((message, place) => message.content && !tooLong(place)).map(({ role, content }) => ({ role, content }));
  if (settings.system.trim()) list.unshift({ role: "system", content: settings.system.trim() });
  return list;
}

/** The setting by which an exit of a model (as /v1/models has it), or a smaller one beside it, may write its tokens. */
export const early = (model) => (model?.exit ? "exit_threshold" : model?.cascade ? "cascade_threshold" : null);

/** The body of a request: the conversation so far, with the settings that were made. `goesOn`: its last message is continued;
 * `early`: the name of the setting by which somebody may write tokens in the model's place. */
export function asked(messages, model, goesOn, early) {
  const body = { model, messages: said(messages), stream: true, stream_options: { include_usage: true } };
  if (goesOn) body.continue_final_message = true;
  for (const name of SENT) if (settings[name] !== null) body[name] = settings[name];
  if (settings.max_tokens !== null) body.max_completion_tokens = settings.max_tokens;
  const stop = settings.stop.split("\n").filter((line) => line);
  if (stop.length) body.stop = stop;
  if (early && settings[early] !== null) Object.assign(body, { [early]: settings[early], return_exits: true });
  if (settings.tokens) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  return body;
}

/** The tokens of an answer that were not recorded: its text is tokenized and scored after what it answers. Throws ApiError. */
export async function score(messages, message, model) {
  const before = said(messages.slice(0, messages.indexOf(message)));
  const [head, tail] = await Promise.all([
    getJson("/tokenize", { body: { model, messages: before } }),
    getJson("/tokenize", { body: { model, prompt: message.content, add_special_tokens: false } }),
  ]);
  const body = { model, prompt: [...head.tokens, ...tail.tokens], echo: true, logprobs: ALTERNATIVES, max_tokens: 0, temperature: 0 };
  const { tokens, token_logprobs: logprobs, top_logprobs: best } = (await getJson("/v1/completions", { body })).choices[0].logprobs;
  return tail.tokens.map((_, place) => {
    const at = head.count + place;
    const entries = Object.entries(best[at] ?? {}).map(([token, logprob]) => ({ token, logprob }));
    return { token: tokens[at], logprob: logprobs[at] ?? 0, top_logprobs: entries.sort((a, b) => b.logprob - a.logprob) };
  });
}

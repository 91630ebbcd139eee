// npm `openai`: chat, streaming, responses, parsed output, models.
import OpenAI from "openai";
import { LARGE, SMALL, URL, main } from "./checks.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name a river." }];

await main({
  async chat() {
    const answer = await client.chat.completions.create({ model: SMALL, messages, max_tokens: 16 });
    if (!answer.choices[0].message.content) throw new Error("empty");
  },
  async stream() {
    let count = 0;
    for await (const chunk of await client.chat.completions.create({ model: SMALL, messages, max_tokens: 16, stream: true })) count += chunk.choices.length;
    if (count < 3) throw new Error(`${count} chunks`);
  },
  async responses() {
    const answer = await client.responses.create({ model: SMALL, input: "Name a river.", max_output_tokens: 16 });
    if (!answer.output_text) throw new Error("empty");
  },
  async schema() {
    const schema = { type: "object", properties: { name: { type: "string", maxLength: 20 } }, required: ["name"], additionalProperties: false };
    const response_format = { type: "json_schema", json_schema: { name: "river", strict: true, schema } };
    const answer = await client.chat.completions.create({ model: LARGE, messages, max_tokens: 48, temperature: 0, response_format });
    if (typeof JSON.parse(answer.choices[0].message.content).name !== "string") throw new Error("no name");
  },
  async models() {
    for await (const model of client.models.list()) if (!model.id) throw new Error("no id");
  },
});

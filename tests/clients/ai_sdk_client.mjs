// npm `ai` with @ai-sdk/openai-compatible: generateText, streamText, typed output, a tool.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { LARGE, SMALL, URL, main } from "./checks.mjs";

const provider = createOpenAICompatible({ name: "headrace", baseURL: URL, apiKey: "none", supportsStructuredOutputs: true });
const prompt = "Name a river.";
const schema = jsonSchema({ type: "object", properties: { name: { type: "string", maxLength: 20 } }, required: ["name"], additionalProperties: false });

await main({
  async text() {
    const { text } = await generateText({ model: provider(SMALL), prompt, maxOutputTokens: 16, maxRetries: 0 });
    if (!text) throw new Error("empty");
  },
  async stream() {
    let parts = 0;
    for await (const part of streamText({ model: provider(SMALL), prompt, maxOutputTokens: 16, maxRetries: 0 }).textStream) parts += part ? 1 : 0;
    if (parts < 3) throw new Error(`${parts} parts`);
  },
  async typed() {
    const given = { model: provider(LARGE), prompt, maxOutputTokens: 48, temperature: 0, maxRetries: 0 };
    const { output } = await generateText({ ...given, output: Output.object({ schema }) });
    if (typeof output.name !== "string") throw new Error("no name");
  },
  async toolRequired() {
    let called = 0;
    const look = tool({ description: "Looks a river up.", inputSchema: schema, execute: async () => { called += 1; return "The Rhine is long."; } });
    const given = { model: provider(LARGE), prompt, maxOutputTokens: 48, temperature: 0, maxRetries: 0, stopWhen: stepCountIs(1) };
    await generateText({ ...given, tools: { look }, toolChoice: "required" });
    if (!called) throw new Error("not called");
  },
});

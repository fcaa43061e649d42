// Vercel's AI SDK, by each of its providers for these APIs: text, streams, several turns, a tool, an object.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";

// "scripted": the model's answers are fixed, so it cannot follow a schema.
const [url, model, kind] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const providers = {
  responses: openai.responses(model),
  chat: openai.chat(model),
  messages: createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model),
  "openai-compatible": createOpenAICompatible({ name: "kvrelay", baseURL: `${url}/v1`, supportsStructuredOutputs: true })(model),
};
const settings = { temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const question = { role: "user", content: "What is the weather in Paris?" };
const weather = (called) =>
  tool({
    description: "The weather in a city.",
    inputSchema: jsonSchema({
      type: "object",
      properties: { city: { type: "string", enum: ["Paris", "Rome", "Berlin"] } },
      required: ["city"],
      additionalProperties: false,
    }),
    execute: async ({ city }) => {
      called.push(city);
      return "sunny";
    },
  });

const must = (holds, what) => {
  if (!holds) throw new Error(what);
};
const checks = {
  "text, and a second turn": async (of) => {
    const system = "Answer in one sentence.";
    const { text, response } = await generateText({ ...settings, model: of, system, messages: [question] });
    must(text, "no text");
    const again = { role: "user", content: "And in Rome?" };
    const more = await generateText({ ...settings, model: of, system, messages: [question, ...response.messages, again] });
    must(more.text, "no text in the second turn");
  },
  "two messages of one user": async (of) => {
    const { text } = await generateText({ ...settings, model: of, messages: [question, { role: "user", content: "Be brief." }] });
    must(text, "no text");
  },
  stream: async (of) => {
    let text = "";
    for await (const piece of streamText({ ...settings, model: of, messages: [question] }).textStream) text += piece;
    must(text, "no text");
  },
  "a tool, and its result": async (of) => {
    const called = [];
    const tools = { get_weather: weather(called) };
    const first = await generateText({ ...settings, model: of, messages: [question], tools, toolChoice: "required" });
    must(called.length >= 1, "the tool was not called"); // a small model repeats its calls
    const messages = [question, ...first.response.messages];
    const { text } = await generateText({ ...settings, model: of, messages, tools, toolChoice: "none" });
    must(text, "no text after the tool's result");
  },
  "an object": async (of) => {
    const schema = jsonSchema({
      type: "object",
      properties: { name: { type: "string", enum: ["Paris", "Rome"] } },
      required: ["name"],
      additionalProperties: false,
    });
    const { output } = await generateText({ ...settings, model: of, messages: [question], output: Output.object({ schema }) });
    must(["Paris", "Rome"].includes(output.name), "no object of the schema");
  },
};

if (kind === "scripted") delete checks["an object"];
for (const [name, of] of Object.entries(providers)) {
  for (const [check, run] of Object.entries(checks)) {
    let why = "";
    try {
      await run(of);
    } catch (error) {
      why = `${error.name}: ${error.message}`.slice(0, 300);
    }
    console.log(JSON.stringify({ check: `${name}: ${check}`, why }));
  }
}

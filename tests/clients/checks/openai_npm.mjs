// The official `openai` client of npm, with runTools.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "What is the capital of France?" }];

const checks = {
  chat: async () => {
    const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
    if (!answer.choices[0].message.content) throw new Error("no content");
  },
  "chat, streamed": async () => {
    let text = "";
    const stream = await client.chat.completions.create({ model, messages, temperature: 0, stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    if (!text) throw new Error("no content");
  },
  runTools: async () => {
    let called = "";
    const runner = client.chat.completions.runTools({
      model,
      messages: [{ role: "user", content: "What is the weather in Paris?" }],
      temperature: 0,
      max_tokens: 100,
      tools: [
        {
          type: "function",
          function: {
            name: "get_weather",
            description: "The weather in a city.",
            parameters: {
              type: "object",
              properties: { city: { type: "string", enum: ["Paris", "Rome", "Berlin"] } },
              required: ["city"],
            },
            parse: JSON.parse,
            function: (args) => {
              called = args.city;
              return "sunny";
            },
          },
        },
      ],
    });
    await runner.finalContent();
    if (!called) throw new Error("the tool was not called");
  },
};

for (const [check, run] of Object.entries(checks)) {
  let why = "";
  try {
    await run();
  } catch (error) {
    why = `${error.name}: ${error.message}`.slice(0, 300);
  }
  console.log(JSON.stringify({ check, why }));
}

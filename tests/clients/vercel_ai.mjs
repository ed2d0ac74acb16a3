// Runs loops with two tools, each with a restart of the server in the middle, a prompt that is too long, and a stream
// that is cancelled, with Vercel's AI SDK.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({ name: "ours", baseURL: process.env.URL, apiKey: "none is needed" });
const model = provider("embedded");
const told = { looked: [], streamed: [] };

function look(seen) {
  return tool({
    description: "Look somewhere.",
    inputSchema: z.object({ where: z.string() }),
    execute: async ({ where }) => {
      if (seen.push(where) === 1) await fetch(`${process.env.CONTROL}/restart`);
      return "a dog";
    },
  });
}

const options = { model, prompt: process.env.TEXT, stopWhen: stepCountIs(5), maxRetries: 0 };
told.text = (await generateText({ ...options, tools: { look: look(told.looked) } })).text;
told.stream = await streamText({ ...options, tools: { look: look(told.streamed) } }).text;

try {
  await generateText({ model, prompt: "word ".repeat(200000), maxRetries: 0 });
} catch (error) {
  told.overflow = [error.statusCode, error.message.includes("maximum context length")];
}

const abort = new AbortController();
const going = streamText({
  model, prompt: "Go on. [[ON one and two and ]]", abortSignal: abort.signal, maxRetries: 0, onError: () => {},
});
try {
  for await (const _ of going.textStream) {
    abort.abort();
    break;
  }
} catch (error) {
  if (error.name !== "AbortError") throw error;
}
told.isIdle = (await fetch(`${process.env.CONTROL}/idle`)).ok; // This process still has its connections.
console.log(JSON.stringify(told));

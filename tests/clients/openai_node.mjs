// Runs loops with two tools over chats and over responses, each with a restart of the server in the middle, a prompt
// that is too long, and a stream that is cancelled, with OpenAI's client for Node.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.URL, apiKey: "none is needed", maxRetries: 0 });
const parameters = { type: "object", properties: { where: { type: "string" } }, required: ["where"] };
const told = {};

const messages = [{ role: "user", content: process.env.TEXT }];
const tools = [{ type: "function", function: { name: "look", description: "Look somewhere.", parameters } }];
told.looked = [];
for (let i = 0; i < 5; i++) {
  const stream = client.chat.completions.stream({ model: "embedded", messages, tools });
  const { choices: [choice] } = await stream.finalChatCompletion();
  messages.push(choice.message);
  if (choice.finish_reason !== "tool_calls") break;
  for (const call of choice.message.tool_calls) {
    told.looked.push(JSON.parse(call.function.arguments).where);
    messages.push({ role: "tool", tool_call_id: call.id, content: "a dog" });
  }
  if (told.looked.length === 1) await fetch(`${process.env.CONTROL}/restart`);
}
told.chat = messages.at(-1).content;

const input = [{ role: "user", content: process.env.TEXT }];
told.responses = [];
for (let i = 0; i < 5; i++) {
  const response = await client.responses.create({
    model: "embedded", input, store: false,
    tools: [{ type: "function", name: "look", description: "Look somewhere.", parameters, strict: false }],
  });
  input.push(...response.output);
  const calls = response.output.filter((item) => item.type === "function_call");
  if (!calls.length) told.said = response.output_text;
  for (const call of calls) {
    told.responses.push(JSON.parse(call.arguments).where);
    input.push({ type: "function_call_output", call_id: call.call_id, output: "a dog" });
  }
  if (!calls.length) break;
  if (told.responses.length === 1) await fetch(`${process.env.CONTROL}/restart`);
}

try {
  const content = "word ".repeat(200000);
  await client.chat.completions.create({ model: "embedded", messages: [{ role: "user", content }] });
} catch (error) {
  told.overflow = [error.status, error.code];
}

const stream = await client.chat.completions.create({
  model: "embedded", messages: [{ role: "user", content: "Go on. [[ON one and two and ]]" }], stream: true,
});
for await (const chunk of stream) {
  if (chunk.choices[0]?.delta?.content) break; // This cancels the request.
}
told.isIdle = (await fetch(`${process.env.CONTROL}/idle`)).ok; // This process still has its connections.
console.log(JSON.stringify(told));

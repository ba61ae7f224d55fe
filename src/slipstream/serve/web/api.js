// Talks to the server this page came from.

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ServerError(body?.error?.message ?? `The server answered ${response.status}.`, response.status);
}

export async function model(key) {
  return (await (await ask("/v1/models", { headers: headers(key) })).json()).data[0];
}

// Yields the parsed chunks of a streamed answer.
export async function* chunks(path, body, key, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server went away in the middle of the answer.", 0);
    }
    if (part.done) throw new ServerError("The answer broke off.", 0);
    held += part.value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, 500);
      yield chunk;
    }
  }
}

// A chat; with a model that has no chat template, text that goes on from all that was said.
export async function* talk(card, { messages, logprobs, top_logprobs, ...body }, key, signal) {
  if (card.chat) {
    yield* chunks("/v1/chat/completions", { messages, logprobs, top_logprobs, ...body }, key, signal);
    return;
  }
  const prompt = messages.map((message) => message.content).join("");
  for await (const chunk of chunks("/v1/completions", { prompt, logprobs: top_logprobs, ...body }, key, signal)) {
    for (const choice of chunk.choices) if (choice.logprobs) choice.logprobs = asInChats(choice.logprobs);
    yield chunk;
  }
}

function asInChats({ tokens, token_logprobs, top_logprobs }) {
  const top = (i) => Object.entries(top_logprobs?.[i] ?? {}).map(([token, logprob]) => ({ token, logprob }));
  return { content: tokens.map((token, i) => ({ token, logprob: token_logprobs[i], top_logprobs: top(i) })) };
}

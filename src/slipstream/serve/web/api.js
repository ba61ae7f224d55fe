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

// Yields the parsed chunks of a streamed chat.
export async function* chat(body, key, signal) {
  const response = await ask("/v1/chat/completions", {
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
      if (chunk.error) throw new ServerError(chunk.error.message, 0);
      yield chunk;
    }
  }
}

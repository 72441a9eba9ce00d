// Requests to this server. The API key, if there is one, stays in this tab's session.

const KEY = "anabranch-key";

export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

// A response that succeeds. Throws Failure with the server's sentence.
async function request(path, body, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "the server does not answer; is it running?");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Failure(response.status, said?.error?.message ?? `status ${response.status}`);
}

export const get = async (path) => (await request(path)).json();
export const post = async (path, body) => (await request(path, body)).json();

// The chunks of a streamed chat completion. Aborting the signal closes the connection, which frees the server's row.
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Failure(0, "the connection broke before the answer ended");
    const events = (left + value).split("\n\n");
    left = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (!data) continue; // a comment that keeps the connection alive
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(200, chunk.error.message);
      yield chunk;
    }
  }
}

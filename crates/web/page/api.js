// The control methods over HTTP: docs/reference/control.md. A reading method is a GET, a changing one a POST with the token.

const PATIENCE_MS = 15_000;

export class Refused extends Error {
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.status = status;
  }

  // The server doesn't know the method, or doesn't know it for this disk.
  get unknown() {
    return this.status === 404 || this.code === -32601;
  }
}

function address(method, params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value === undefined || value === null) continue;
    query.set(name, typeof value === "object" ? JSON.stringify(value) : String(value));
  }
  const text = query.toString();
  return `/api/${method}${text ? `?${text}` : ""}`;
}

async function answer(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    body = null;
  }
  if (response.ok && body !== null) return body;
  const error = body?.error ?? {};
  throw new Refused(error.message ?? `the server answered ${response.status}`, error.code ?? 0, response.status);
}

export async function ask(method, params = {}) {
  const response = await fetch(address(method, params), {
    cache: "no-store",
    credentials: "omit",
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  return answer(response);
}

export async function change(method, params, token) {
  const response = await fetch(`/api/${method}`, {
    method: "POST",
    cache: "no-store",
    credentials: "omit",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
    body: JSON.stringify(params),
    // A disk may take up to a minute to be opened or closed.
    signal: AbortSignal.timeout(70_000),
  });
  return answer(response);
}

const AGAIN_MS = 3_000;

// A stream of objects until close(). `tell.object(value)`, `tell.state("open" | "waiting" | "missing", why)`.
export function stream(method, params, tell) {
  let source = null;
  let again = null;
  let closed = false;
  const open = () => {
    source = new EventSource(address(method, params));
    source.onopen = () => tell.state("open");
    source.onmessage = (message) => {
      let value;
      try {
        value = JSON.parse(message.data);
      } catch {
        return;
      }
      tell.object(value);
    };
    source.onerror = () => {
      const refused = source.readyState === EventSource.CLOSED;
      source.close();
      if (closed) return;
      tell.state("waiting");
      // The browser's own attempts end when the server refuses; its reason is found by asking plainly.
      if (refused) why(method, params).then((error) => !closed && error?.unknown && tell.state("missing", error.message));
      again = setTimeout(open, AGAIN_MS);
    };
  };
  open();
  return {
    close() {
      closed = true;
      clearTimeout(again);
      source.close();
    },
  };
}

// The reason for which a stream is refused; null if it isn't.
async function why(method, params) {
  const stop = new AbortController();
  try {
    const response = await fetch(address(method, params), { cache: "no-store", signal: stop.signal });
    if (response.ok) return null;
    await answer(response);
    return null;
  } catch (error) {
    return error instanceof Refused ? error : null;
  } finally {
    stop.abort();
  }
}

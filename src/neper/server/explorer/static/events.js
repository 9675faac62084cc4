/** @file Events: the data of a stream of server-sent events. */

/**
 * The events that have arrived, as a list for each piece of the stream.
 *
 * A line belongs to an event of one line, as this server writes them. Comments are skipped.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string[]>}
 */
export async function* events(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      const lines = (rest + decoder.decode(value, { stream: !done })).split("\n");
      rest = lines.pop() ?? "";
      const found = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (found.length) yield found;
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

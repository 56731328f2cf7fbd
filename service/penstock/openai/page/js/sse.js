// Reads the data of server-sent events from a stream of bytes.

/** Yields the data of each event, as soon as the event is complete. Data in several lines is joined by "\n". */
export async function* eventData(bytes) {
  const reader = bytes.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A "\r" at the end may be the first half of a "\r\n" whose second half is still on its way.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      if (done) return;
    }
  } finally {
    // Also when the reader of the events leaves early: nobody else will read the rest.
    await reader.cancel().catch(() => {});
  }
}

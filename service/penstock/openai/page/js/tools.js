// Small functions that the model may call. They run in this page, and what they return is invented or computed
// here: nothing is sent anywhere but to the model.

const CONDITIONS = ["sunny", "cloudy", "rainy", "windy", "foggy", "clear", "overcast", "dry"];

const TOOLS = {
  get_weather: {
    description: "Get the weather in a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", description: "The name of the city." } },
      required: ["city"],
    },
    run({ city }) {
      if (typeof city !== "string" || !city.trim()) throw new Error("city must be the name of a city");
      // The same city always has the same weather, so that an answer can be tried again.
      const number = hash(city.trim().toLowerCase());
      return JSON.stringify({ temperature: (number % 31) - 2, condition: CONDITIONS[(number >>> 8) % CONDITIONS.length] });
    },
  },
  get_time: {
    description: "Get the date and the time of day.",
    parameters: {
      type: "object",
      properties: { time_zone: { type: "string", description: "Such as Europe/Paris. Left out: that of the user." } },
    },
    run({ time_zone: timeZone }) {
      const options = { dateStyle: "full", timeStyle: "long", ...(timeZone === undefined ? {} : { timeZone }) };
      return new Intl.DateTimeFormat("en-GB", options).format(new Date());
    },
  },
};

/** The tools as a request offers them. */
export const DEFINITIONS = Object.entries(TOOLS).map(([name, { description, parameters }]) => ({
  type: "function",
  function: { name, description, parameters },
}));

/** What a call returns, as text for the model. A call that cannot be run returns why, so that the model can mend it. */
export function runTool(name, text) {
  const tool = Object.hasOwn(TOOLS, name) ? TOOLS[name] : null;
  if (!tool) return problem(`There is no tool named ${name}.`);
  let values;
  try {
    values = JSON.parse(text || "{}");
  } catch {
    return problem("The arguments are not JSON.");
  }
  if (values === null || typeof values !== "object" || Array.isArray(values)) {
    return problem("The arguments are not a JSON object.");
  }
  try {
    return tool.run(values);
  } catch (error) {
    return problem(error.message);
  }
}

function problem(message) {
  return JSON.stringify({ error: message });
}

/** FNV-1a, in 32 bits. */
function hash(text) {
  let value = 0x811c9dc5;
  for (const character of text) value = Math.imul(value ^ character.codePointAt(0), 0x01000193) >>> 0;
  return value;
}

package penstock.conformance;

import com.google.gson.Gson;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.gson.reflect.TypeToken;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import penstock.client.PenstockClient;

/**
 * Makes the calls of a file of cases, and prints what came of each as a line of JSON. tests/conformance compares these
 * lines with those of the other languages' clients, and with the table of what is right.
 *
 * <p>Arguments: {@code --addr HOST:PORT --cases FILE}.
 */
public final class Main {
    private Main() {}

    /** One entry of a file of cases; what it expects is compared elsewhere. */
    record Case(
            String name,
            String method,
            List<JsonElement> requests,
            Map<String, String> metadata,
            Optional<Double> timeoutSeconds) {
        static Case of(JsonObject entry) {
            Map<String, String> metadata =
                    new Gson().fromJson(entry.get("metadata"), new TypeToken<Map<String, String>>() {});
            return new Case(
                    entry.get("name").getAsString(),
                    entry.get("method").getAsString(),
                    entry.getAsJsonArray("requests").asList(),
                    metadata == null ? Map.of() : metadata,
                    Optional.ofNullable(entry.get("timeout_s")).map(JsonElement::getAsDouble));
        }
    }

    /**
     * Runs the program.
     *
     * @param arguments as above
     * @throws Exception if a case cannot be run
     */
    public static void main(String[] arguments) throws Exception {
        if (arguments.length != 4 || !arguments[0].equals("--addr") || !arguments[2].equals("--cases")) {
            throw new IllegalArgumentException("usage: --addr HOST:PORT --cases FILE");
        }
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        JsonArray cases = JsonParser.parseString(Files.readString(Path.of(arguments[3]))).getAsJsonArray();
        try (PenstockClient client = PenstockClient.builder(arguments[1]).withoutRetries().build()) {
            Calls calls = new Calls(client.channel());
            for (JsonElement entry : cases) {
                out.println(calls.make(Case.of(entry.getAsJsonObject())));
            }
        }
    }
}

import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import penstock.client.ClientBuilder;
import penstock.client.PenstockClient;
import penstock.client.Tls;

/** The command line of the examples: options as "--name value", then words. */
record Arguments(Map<String, String> options, List<String> words) {
    static Arguments of(String[] arguments) {
        Map<String, String> options = new HashMap<>();
        List<String> words = new ArrayList<>();
        for (int i = 0; i < arguments.length; i++) {
            if (arguments[i].startsWith("--") && i + 1 < arguments.length) {
                options.put(arguments[i].substring(2), arguments[++i]);
            } else {
                words.add(arguments[i]);
            }
        }
        return new Arguments(options, words);
    }

    Optional<String> option(String name) {
        return Optional.ofNullable(options.get(name));
    }

    /** A client for --addr, --ca, --cert and --key; the key of a caller is in the variable PENSTOCK_TOKEN. */
    ClientBuilder client() throws IOException {
        String otherwise = Optional.ofNullable(System.getenv("PENSTOCK_ADDR")).orElse("127.0.0.1:50051");
        ClientBuilder builder = PenstockClient.builder(option("addr").orElse(otherwise));
        if (option("ca").isPresent()) {
            Tls tls = Tls.trusting(Path.of(options.get("ca")));
            builder.tls(
                    option("cert").isEmpty()
                            ? tls
                            : tls.withCertificate(Path.of(options.get("cert")), Path.of(options.get("key"))));
        }
        Optional.ofNullable(System.getenv("PENSTOCK_TOKEN")).ifPresent(builder::key);
        return builder;
    }
}

import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalLong;
import java.util.TreeMap;
import penstock.client.ClientBuilder;
import penstock.client.PenstockClient;
import penstock.client.Tls;

/** The command line of the examples: options as "--name value", then words. A "--" alone ends the options. */
record Arguments(String usage, Map<String, String> options, List<String> words) {
    /** The options of all examples, with what they say. */
    private static final Map<String, String> CONNECTION = Map.of(
            "addr", "HOST:PORT or unix:/PATH of the server; otherwise PENSTOCK_ADDR, or 127.0.0.1:50051",
            "ca", "use TLS, and trust the authorities in this PEM file",
            "cert", "PEM file of the client's certificate (mTLS)",
            "key", "PEM file of the private key of --cert");

    /**
     * Reads the command line of a program, such as "Story PROMPT", whose own options are in {@code own}. Prints the
     * usage and ends the program for --help, and for what it does not know.
     */
    static Arguments of(String program, Map<String, String> own, String[] arguments) {
        Map<String, String> known = new TreeMap<>(CONNECTION);
        known.putAll(own);
        StringBuilder usage = new StringBuilder("usage: " + program.replaceFirst(" ", " [--option value]... "));
        known.forEach((name, meaning) -> usage.append(String.format("%n  --%-12s %s", name, meaning)));
        Arguments given = new Arguments(usage.toString(), new HashMap<>(), new ArrayList<>());
        given.read(known, arguments);
        return given;
    }

    private void read(Map<String, String> known, String[] arguments) {
        for (int i = 0; i < arguments.length; i++) {
            String argument = arguments[i];
            if (argument.equals("--help") || argument.equals("-h")) {
                System.out.println(usage);
                System.exit(0);
            } else if (argument.equals("--")) {
                words.addAll(List.of(arguments).subList(i + 1, arguments.length));
                return;
            } else if (!argument.startsWith("-")) {
                words.add(argument);
            } else if (!argument.startsWith("--") || !known.containsKey(argument.substring(2))) {
                throw refused("there is no option " + argument);
            } else if (i + 1 == arguments.length) {
                throw refused(argument + " needs a value");
            } else {
                options.put(argument.substring(2), arguments[++i]);
            }
        }
    }

    /** Says what is wrong and how the program is used, and ends it. It is thrown only so that javac knows. */
    IllegalArgumentException refused(String why) {
        System.err.println(why + "\n" + usage);
        System.exit(2);
        return new IllegalArgumentException(why);
    }

    Optional<String> option(String name) {
        return Optional.ofNullable(options.get(name));
    }

    /** The whole number that an option has; empty without the option. */
    OptionalLong number(String name) {
        try {
            return option(name).map(Long::parseLong).map(OptionalLong::of).orElseGet(OptionalLong::empty);
        } catch (NumberFormatException error) {
            throw refused("--" + name + " needs a whole number, not " + options.get(name));
        }
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

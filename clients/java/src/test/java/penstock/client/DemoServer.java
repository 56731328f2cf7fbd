package penstock.client;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * A server of the demo model in a process of its own. PENSTOCK_COMMAND says how to run Penstock's command line, and
 * PENSTOCK_TEST_CACHE where compiled programs are kept.
 */
final class DemoServer implements AutoCloseable {
    static final Path ROOT = Path.of("../..").toAbsolutePath().normalize();
    static final Path CERTS = ROOT.resolve("tests/service/certs");
    static final Path CHECKPOINT =
            ROOT.resolve("runtime/penstock/runtime/loading/demo_model/model.safetensors");

    private static final int START_SECONDS = 280;
    private static final Pattern READY = Pattern.compile("ready on (127\\.0\\.0\\.1:\\d+)");
    private static DemoServer shared;

    private final Process process;
    private final String address;

    private DemoServer(Process process, String address) {
        this.process = process;
        this.address = address;
    }

    /** The server without options that most tests share. It ends with the tests' process. */
    static synchronized DemoServer shared() throws IOException {
        if (shared == null) {
            shared = start("--grace", "0");
        }
        return shared;
    }

    /** Starts a server with these options, and waits until it is ready. */
    static DemoServer start(String... flags) throws IOException {
        List<String> command = penstock("serve", "demo", "--port", "0");
        String cache = System.getenv("PENSTOCK_TEST_CACHE");
        if (cache != null) {
            command.addAll(List.of("--compilation-cache", cache));
        }
        command.addAll(Arrays.asList(flags));
        Process process = new ProcessBuilder(command).redirectErrorStream(true).start();
        Runtime.getRuntime().addShutdownHook(new Thread(process::destroyForcibly));
        return new DemoServer(process, address(process));
    }

    /** What a command of the command line printed. */
    static String run(String... arguments) throws IOException, InterruptedException {
        Process process =
                new ProcessBuilder(penstock(arguments)).redirectError(ProcessBuilder.Redirect.INHERIT).start();
        String said = new String(process.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
        if (process.waitFor() != 0) {
            throw new IOException("penstock " + String.join(" ", arguments) + " failed: " + said);
        }
        return said.strip();
    }

    String address() {
        return address;
    }

    int port() {
        return Integer.parseInt(address.substring(address.indexOf(':') + 1));
    }

    PenstockClient client() {
        return PenstockClient.builder(address).build();
    }

    /** Sends SIGTERM. */
    void terminate() {
        process.destroy();
    }

    /** Waits for the end. */
    int exitCode() throws InterruptedException {
        if (!process.waitFor(60, TimeUnit.SECONDS)) {
            throw new AssertionError("the server did not end");
        }
        return process.exitValue();
    }

    @Override
    public void close() {
        process.destroyForcibly();
    }

    private static List<String> penstock(String... arguments) {
        Map<String, String> environment = System.getenv();
        String program = environment.getOrDefault(
                "PENSTOCK_COMMAND", ROOT.resolve(".venv/bin/python") + " -u -m penstock.cli");
        List<String> words = new ArrayList<>(List.of(program.split(" ")));
        if (!Files.isExecutable(Path.of(words.get(0)))) {
            throw new IllegalStateException("no " + words.get(0) + ": say `make install`, or set PENSTOCK_COMMAND");
        }
        words.addAll(Arrays.asList(arguments));
        return words;
    }

    private static String address(Process process) throws IOException {
        Thread slow = daemon(() -> {
            Thread.sleep(TimeUnit.SECONDS.toMillis(START_SECONDS));
            return process.destroyForcibly();
        });
        StringBuilder said = new StringBuilder();
        BufferedReader lines =
                new BufferedReader(new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            said.append(line).append('\n');
            Matcher ready = READY.matcher(line);
            if (ready.find()) {
                slow.interrupt();
                daemon(() -> lines.lines().count()); // otherwise the pipe would fill
                return ready.group(1);
            }
        }
        throw new IOException("the demo server did not start:\n" + said);
    }

    private static Thread daemon(java.util.concurrent.Callable<?> work) {
        Thread thread = new Thread(() -> {
            try {
                work.call();
            } catch (Exception ended) {
                // The server is ready, or has ended.
            }
        });
        thread.setDaemon(true);
        thread.start();
        return thread;
    }
}

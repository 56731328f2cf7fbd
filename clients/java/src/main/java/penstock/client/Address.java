package penstock.client;

import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * Where a server is.
 *
 * @param target the address in gRPC's form
 * @param local whether what is sent there stays on this machine
 */
record Address(String target, boolean local) {
    private static final int DEFAULT_PORT = 50051;
    private static final Pattern HOST_AND_PORT =
            Pattern.compile("(\\[[0-9a-fA-F:.%]+]|[^\\s:/\\[\\],]+)(?::(\\d{1,5}))?");
    private static final Pattern LOOPBACK = Pattern.compile("(?i)localhost|127(\\.\\d{1,3}){3}|\\[::1]");

    /**
     * Reads "host", "host:port", "[::1]:port", "unix:/path", or a target of gRPC's such as "dns:///host:port".
     *
     * @throws IllegalArgumentException for anything else
     */
    static Address parse(String address) {
        if (address.startsWith("unix:/")) {
            return new Address(address, true);
        }
        if (address.startsWith("dns:///")) {
            return new Address(address, false);
        }
        Matcher found = HOST_AND_PORT.matcher(address);
        if (!found.matches()) {
            throw new IllegalArgumentException(
                    "an address is host:port, [::1]:port, unix:/path or dns:///host:port, not \"" + address + "\"");
        }
        int port = found.group(2) == null ? DEFAULT_PORT : Integer.parseInt(found.group(2));
        if (port < 1 || port > 65_535) {
            throw new IllegalArgumentException("a port is 1 to 65535, not " + port);
        }
        return new Address(found.group(1) + ":" + port, LOOPBACK.matcher(found.group(1)).matches());
    }
}

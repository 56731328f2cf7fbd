package penstock.client;

/** Is told how far a weight update is. */
@FunctionalInterface
public interface UpdateProgress {
    /**
     * A piece was handed to the connection. It is called by the thread that updates; what it throws ends the update,
     * which then changes nothing.
     *
     * @param sentBytes bytes of tensors so far
     * @param totalBytes bytes of all tensors
     */
    void sent(long sentBytes, long totalBytes);
}

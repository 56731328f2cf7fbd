package penstock.client;

import io.grpc.StatusRuntimeException;

/**
 * What an exception is made of.
 *
 * @param updateId the id of the weight update that the call was for; empty for other calls
 */
record Failure(StatusDetails details, StatusRuntimeException cause, String updateId) {}

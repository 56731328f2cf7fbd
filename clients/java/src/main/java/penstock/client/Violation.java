package penstock.client;

/**
 * What is wrong with one field of a request.
 *
 * @param field the contract's dotted path, such as "sampling.top_p"
 * @param description what is wrong, in words
 */
public record Violation(String field, String description) {}

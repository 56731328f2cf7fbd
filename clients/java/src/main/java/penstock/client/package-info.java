/** A client of Penstock: start at {@link penstock.client.PenstockClient}. */
package penstock.client;

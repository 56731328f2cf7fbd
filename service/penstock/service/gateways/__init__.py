"""Services of other servers, for gateways that speak to those. All are off unless an operator asks."""

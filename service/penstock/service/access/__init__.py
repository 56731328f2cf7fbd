"""Who calls, what each caller may do and how often, and which requests belong to whom.

The interceptor decides from the headers of an RPC, before its message is received (`rpcs.interceptors`). It
makes a `Caller` of a key or a certificate, looks whether the caller has the role that the RPC needs
(`roles`), and whether it has used up what it may have at once and per minute (`rates`). CURRENT_CALLER is a
context variable, so that each RPC's task sees its own caller. The engine's id of a request holds its
caller's id (`ownership`): an Abort by id, by prefix or of all reaches the caller's own requests without a
second index, and only `Abort` looks past that, for the role control.
"""

"""Drives the web page of the OpenAI front in a browser, for its tests and for the pictures of it."""

"""This folder holds three walks through the code, and the tool that counts them: `python -m tools.walks`."""

"""What every RPC passes on its way in and out, whatever its method is."""

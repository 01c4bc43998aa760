"""Samplers that few rows use: DRY, XTC, mirostat, dynamic temperature."""

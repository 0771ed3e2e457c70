"""Configuration: documents, settings, choices by name, presets and what is checked before anything is trained."""

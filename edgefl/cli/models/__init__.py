"""Commands about models and bundles: export, verify, deploy, fit a device, profile."""

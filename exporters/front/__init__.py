"""The front of the compiler: a submodel, its program and the samples' shape in, a bundle out. Reads no configuration.

::

    codec = codecs.build("dense")
    tier = Tier("weak", submodel, coded_program(submodel, "sgd", {"lr": 0.1}, codec))
    bundle = compiled(tier, tier.main, model="resnet8", data=data)
    bundle = cached(BundleCache.of_user(), tier, tier.main, model="resnet8", data=data).bundle     # once for all
"""

"""The compiler: one exchange of a tier in, a bundle out. Reads no configuration.

::

    algorithm = coded_algorithm(submodel, "sgd", {"lr": 0.1}, codecs.build("dense"))
    tier = TierTraining("weak", submodel, algorithm)
    compiler = Compiler(target_of("onnx"), cache=BundleCache.of_user())
    bundle = compiler.compile(tier.request(tier.main, model="resnet8", data=data)).bundle
"""

"""Model families: what each needs, said once, on CPU.

base           Family and ImageRule: what a family's file answers
registry       a model folder -> its family
coordinates    how a family writes boxes and points
image_family, image_processor, tiles, flops, configs, processor_config
               what families share
the others     a family each, or a line of them
"""

"""Other libraries' own names and signatures, on this library's engine: switch by changing one import."""

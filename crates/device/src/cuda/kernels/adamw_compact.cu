// AdamW with compact masters.

#include "compact.cuh"
#include "adamw.cu"

// Lion with compact masters.

#include "compact.cuh"
#include "lion.cu"

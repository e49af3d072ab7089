// Stochastic gradient descent with compact masters.

#include "compact.cuh"
#include "sgd.cu"

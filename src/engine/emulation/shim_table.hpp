
// The launch of a function over a table.
#ifdef FOLDS
#define OPTIMISER(leaves, block_offsets, count, results) optimiser(leaves, block_offsets, count, results)
#else
#define OPTIMISER(leaves, block_offsets, count, results) optimiser(leaves, block_offsets, count)
#endif
static thread_local struct { const Leaf* leaves; const unsigned int* block_offsets; unsigned int count; double* results; } arguments;

static void run_thread() { OPTIMISER(arguments.leaves, arguments.block_offsets, arguments.count, arguments.results); }

extern "C" void launch(unsigned int blocks, const Leaf* leaves, const unsigned int* block_offsets, unsigned int count, double* results) {
    arguments = { leaves, block_offsets, count, results };
    run_blocks(blocks);
}

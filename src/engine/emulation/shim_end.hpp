
// Runs the blocks of a launch one after another.
#ifdef FOLDS
static thread_local struct { const Leaf* leaves; const unsigned int* firsts; unsigned int count; double* results; } arguments;
static thread_local bool finished[THREADS];

static void fiber() {
    optimiser(arguments.leaves, arguments.firsts, arguments.count, arguments.results);
    finished[threadIdx.x] = true;
}

extern "C" void launch(unsigned int blocks, const Leaf* leaves, const unsigned int* firsts, unsigned int count, double* results) {
    arguments = { leaves, firsts, count, results };
    char* stacks = (char*)__builtin_malloc((unsigned long)THREADS * STACK);
    ucontext_t* fibers = (ucontext_t*)__builtin_malloc(THREADS * sizeof(ucontext_t));
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (unsigned int thread = 0; thread < THREADS; ++thread) {
            finished[thread] = false;
            getcontext(&fibers[thread]);
            fibers[thread].uc_stack.ss_sp = stacks + (unsigned long)thread * STACK;
            fibers[thread].uc_stack.ss_size = STACK;
            fibers[thread].uc_link = &scheduler;
            makecontext(&fibers[thread], fiber, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) {
                if (finished[threadIdx.x]) continue;
                running = &fibers[threadIdx.x];
                swapcontext(&scheduler, running);
                left = left || !finished[threadIdx.x];
            }
        }
    }
    __builtin_free(fibers);
    __builtin_free(stacks);
}
#else
extern "C" void launch(unsigned int blocks, const Leaf* leaves, const unsigned int* firsts, unsigned int count, double*) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) optimiser(leaves, firsts, count);
}
#endif

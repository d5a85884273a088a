
// Runs the blocks of a launch one after another.
#ifdef FOLDS
#define OPTIMISER(leaves, block_offsets, count, results) optimiser(leaves, block_offsets, count, results)
#else
#define OPTIMISER(leaves, block_offsets, count, results) optimiser(leaves, block_offsets, count)
#endif
#ifdef WAITS
static thread_local struct { const Leaf* leaves; const unsigned int* block_offsets; unsigned int count; double* results; } arguments;
static thread_local enum { NEW, WAITING, FINISHED } progress[THREADS];

static void fiber() {
    OPTIMISER(arguments.leaves, arguments.block_offsets, arguments.count, arguments.results);
    progress[threadIdx.x] = FINISHED;
    _longjmp(scheduler, 1);
}

// Runs a thread up to its next barrier, or to its end. It comes back by a jump.
static void go_on(char* stacks) {
    if (_setjmp(scheduler)) return;
    if (progress[threadIdx.x] == WAITING) _longjmp(waiting[threadIdx.x], 1);
    progress[threadIdx.x] = WAITING;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = stacks + (unsigned long)threadIdx.x * STACK;
    start.uc_stack.ss_size = STACK;
    start.uc_link = nullptr;
    makecontext(&start, fiber, 0);
    setcontext(&start);
}

extern "C" void launch(unsigned int blocks, const Leaf* leaves, const unsigned int* block_offsets, unsigned int count, double* results) {
    arguments = { leaves, block_offsets, count, results };
    char* stacks = (char*)__builtin_malloc((unsigned long)THREADS * STACK);
    waiting = (jmp_buf*)__builtin_malloc(THREADS * sizeof(jmp_buf));
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (unsigned int thread = 0; thread < THREADS; ++thread) progress[thread] = NEW;
        for (bool left = true; left;) {
            left = false;
            for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) {
                if (progress[threadIdx.x] != FINISHED) go_on(stacks);
                left = left || progress[threadIdx.x] != FINISHED;
            }
        }
    }
    __builtin_free(waiting);
    __builtin_free(stacks);
}
#else
extern "C" void launch(unsigned int blocks, const Leaf* leaves, const unsigned int* block_offsets, unsigned int count, double* results) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) OPTIMISER(leaves, block_offsets, count, results);
}
#endif
